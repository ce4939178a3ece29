"""What the experiments train: data sets and networks that two CPU cores train in minutes."""
