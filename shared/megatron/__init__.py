"""megatron-core's GPTModel over tensor, pipeline and context parallel ranks, from Hugging Face folders.

Must be imported in a process of its own kind (a worker): megatron-core keeps its process groups in module variables.
"""

import warnings

# every import of megatron-core without its CUDA companions says so some eight times, on each rank
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)
