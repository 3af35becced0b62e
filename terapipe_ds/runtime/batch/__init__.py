"""What is drawn, agreed and in flight: batches, their slices, and the loss that the slices make up."""
