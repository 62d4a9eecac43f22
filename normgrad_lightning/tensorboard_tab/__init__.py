"""The NormGrad tab of TensorBoard, and the same page as one file.

A run stores a blob for each event (`event`, `stored`), the plugin serves it (`plugin`), and the page in `page/` draws
it. A report (`report`) is the same page with its data inside. Nothing here imports torch or Lightning: TensorBoard
loads it.
"""
