"""What layers are called, and how their tensors are read as channels on a grid."""
