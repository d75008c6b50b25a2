"""The CUDA device: captured graphs of plain torch, launched and awaited through cuda-python."""
