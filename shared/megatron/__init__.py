"""megatron-core's GPTModel over tensor, pipeline and context parallel ranks, from Hugging Face folders.

Import it only in dedicated (worker) processes, because megatron-core keeps its process groups in module variables.
"""

import warnings

# Without its CUDA companions, every import of megatron-core gives this warning about eight times on each rank.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)
