"""Readers of model files: configuration and weights from GGUF and safetensors."""
