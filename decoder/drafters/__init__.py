"""Drafters propose tokens: n-gram lookup, a small model, EAGLE-3, and a script for tests."""
