"""The three checks of `verify`: agreement, reference, quality; and their evidence."""
