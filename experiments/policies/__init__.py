"""A laboratory for policies: gradients of trainings, recorded once, and every policy replayed on the same ones."""
