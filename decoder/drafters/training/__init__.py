"""Trains an EAGLE-3 drafter on the target's own answers: prompts, answers, vocabulary, network, tau, training, export."""
