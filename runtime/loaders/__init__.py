"""Reading checkpoints: GGUF and safetensors files, their configurations, one interface over both."""
