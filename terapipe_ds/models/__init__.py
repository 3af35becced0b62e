"""Models that plug into a DeepSpeed `PipelineModule` and train in token slices."""
