"""What thinwire attaches to, one file per thing that PyTorch lets us attach to."""
