"""From a page to where a run keeps its results: TensorBoard, W&B, MLflow, Comet, Aim, files."""
