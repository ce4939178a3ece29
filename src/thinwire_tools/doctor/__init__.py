"""Is a training bound by its communication, and what would help? Measures, predicts, advises."""
