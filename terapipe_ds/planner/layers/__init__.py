"""What does a layer cost? One source for the time, the memory and the messages of any cut of the layers."""
