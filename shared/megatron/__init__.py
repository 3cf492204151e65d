"""Runs megatron-core's GPTModel, loaded from Hugging Face folders, on tensor-, pipeline-, context- and expert-parallel
ranks.

Import it only in dedicated (worker) processes, because megatron-core keeps its process groups in module variables.
"""

import warnings

# If its CUDA companion packages are absent, megatron-core warns of this about eight times per rank on import.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)
