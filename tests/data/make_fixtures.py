"""Makes the tiny qwen2 and gemma3 files of this folder, and the logits and token ids that tests compare with.

Random weights, toy vocabularies: nobody's model is in them. llama.cpp's own converter and quantizer write the files;
the reference logits come from the transformers class with every weight dequantized by gguf.quants. Nothing here uses
torch_qgemv. The README beside this file says what to install and how to run it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import sentencepiece
import torch
from llama_cpp_py_sync import _cffi_bindings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast, Qwen2Config

HERE = Path(__file__).parent
VOCABULARY = 512
IDS = [1, 7, 33, 72, 101, 250, 9, 64, 5, 128]
TEXTS = [
    "the answer, then another one in an inner thread",
    "  two spaces, a tab\tand\nnew lines\r\n\n\n end ",
    "It's 1234567890 and I'LL pay $3.14",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \u041f\u0440\u0438\u0432\u0435\u0442 \U0001f600\U0001f44d\U0001f3fd",
]
SENTENCES = [
    "the quick brown fox jumps over the lazy dog and then another one",
    "an answer to the question is often another question in the end",
    "there are more things in heaven and earth than in this tiny vocabulary",
]
Q4_K_M = 15  # llama_ftype
MIX = {  # tensor name pattern -> type, like the mixes that are published as UD-Q4_K_XL
    r"token_embd\.weight": "Q5_K",
    r"ffn_down": "Q5_K",
    r"ffn_gate": "Q4_K",
    r"ffn_up": "IQ4_XS",
    r"attn_v\.weight": "Q6_K",
    r"attn_k\.weight": "Q8_0",
    r"attn_q\.weight": "Q4_K",
    r"attn_output": "IQ4_XS",
}
SPECIAL_IDS = {"bos_token_id": 264, "eos_token_id": 265, "pad_token_id": 266}
CONFIGS = {
    "tiny-qwen2": Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **SPECIAL_IDS,
    ),
    # Six layers, since only every sixth sees past the window; the scaled rope is that of the larger Gemma 3 models.
    "tiny-gemma3": Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=512,
        sliding_window=4,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    ),
}


def save_byte_level_vocabulary(folder: Path) -> None:
    """256 bytes, eight merges, three special tokens and fillers."""
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("t", "h"), ("i", "n"), ("a", "n"), ("e", "r"), ("th", "e"), ("o", "n"), ("\u0120", "t"), ("\u0120", "a")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.add_tokens([f"<extra_{index}>" for index in range(VOCABULARY - 32 - len(fast))])
    fast.save_pretrained(folder)


def save_sentencepiece_vocabulary(folder: Path) -> None:
    """SentencePiece BPE with byte fallback, special ids as in Gemma, and user-defined runs of new lines and spaces."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=350,
        byte_fallback=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>", "unk_piece": "<unk>"},
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        user_defined_symbols=["\n", "\n\n", "\u2581\u2581", "\u2581\u2581\u2581"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()


def make_checkpoint(name: str, folder: Path, seed: int) -> None:
    """A transformers checkpoint with random weights and a toy vocabulary."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in key:
                parameter.add_(noise * 0.1)
            elif key.endswith("bias"):
                parameter.copy_(noise * 0.1)
            else:
                parameter.copy_(noise * (0.5 if "embed" in key else 0.6 / parameter.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    (save_sentencepiece_vocabulary if name == "tiny-gemma3" else save_byte_level_vocabulary)(folder)


# A toy vocabulary has no hash that the converter knows, hence the fixed answer.
CONVERT = """
import conversion.base, runpy, sys
conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(llama_cpp: Path, checkpoint: Path, output: Path) -> None:
    """Runs llama.cpp's convert_hf_to_gguf.py, in a process of its own since it brings its own gguf package."""
    paths = [str(llama_cpp / "gguf-py"), str(llama_cpp), *filter(None, [os.environ.get("PYTHONPATH")])]
    arguments = [llama_cpp / "convert_hf_to_gguf.py", checkpoint, "--outtype", "f32", "--outfile", output]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", CONVERT, *map(str, arguments)], env=environment, check=True)


class LlamaCpp:
    """libllama, called through the declarations of llama-cpp-py-sync."""

    def __init__(self, folder: Path):
        self.ffi = _cffi_bindings.get_ffi()
        self.lib = self.ffi.dlopen(str(next(folder.glob("libllama.v*.so"))))
        backends = ctypes.CDLL(str(next(folder.glob("libggml.v*.so"))))
        backends.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        backends.ggml_backend_load_all_from_path(str(folder).encode())
        self.lib.llama_backend_init()

    def quantize(self, source: Path, target: Path, overrides: dict[str, str]) -> None:
        ffi = self.ffi
        parameters = ffi.new("llama_model_quantize_params *", self.lib.llama_model_quantize_default_params())
        parameters.ftype, parameters.nthread = Q4_K_M, 1
        patterns = [ffi.new("char[]", pattern.encode()) for pattern in overrides]
        array = ffi.new("struct llama_model_tensor_override[]", len(overrides) + 1)  # ends with a null pattern
        for item, pattern, quant_type in zip(array, patterns, overrides.values(), strict=False):
            item.pattern, item.type = pattern, gguf.GGMLQuantizationType[quant_type]
        if overrides:
            parameters.tt_overrides = array
        if self.lib.llama_model_quantize(str(source).encode(), str(target).encode(), parameters):
            raise RuntimeError(f"llama.cpp could not quantize {source}")

    def tokenize(self, path: Path, texts: list[str]) -> list[list[int]]:
        parameters = self.lib.llama_model_default_params()
        parameters.vocab_only = True
        model = self.lib.llama_model_load_from_file(str(path).encode(), parameters)
        vocabulary, ids = self.lib.llama_model_get_vocab(model), []
        for text in texts:
            data = text.encode()
            buffer = self.ffi.new("llama_token[]", len(data) + 16)
            count = self.lib.llama_tokenize(vocabulary, data, len(data), buffer, len(buffer), True, True)
            ids.append(list(buffer[0:count]))
        self.lib.llama_model_free(model)
        return ids


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def dequantized_logits(model: torch.nn.Module, path: Path) -> np.ndarray:
    """Logits of `model` with the weights of a GGUF file, all dequantized."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    name = reader.fields["general.architecture"].contents()
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            tensor = tensors[names.get_name(key, try_suffixes=(".weight", ".bias"))]
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            # Gemma's norms multiply by 1 + weight in transformers, by the weight in GGUF.
            parameter.copy_(values - 1 if name == "gemma3" and key.endswith("norm.weight") else values)
    return logits(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("llama_cpp", type=Path, help="llama.cpp's source, with convert_hf_to_gguf.py")
    parser.add_argument("libraries", type=Path, help="folder with libllama.v*.so, libggml.v*.so and the CPU backends")
    arguments = parser.parse_args()
    llama_cpp = LlamaCpp(arguments.libraries)
    references = dict(np.load(HERE / "reference_logits.npz"))
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in enumerate(CONFIGS, start=11):
            checkpoint, full = Path(scratch, name), Path(scratch, f"{name}.gguf")
            make_checkpoint(name, checkpoint, seed)
            convert(arguments.llama_cpp, checkpoint, full)
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
            references[f"{name}.f32_model"] = logits(model)
            for kind, overrides in (("Q4_K_M", {}), ("UDmix", MIX)):
                path = HERE / f"{name}-{kind}.gguf"
                llama_cpp.quantize(full, path, overrides)
                references[f"{path.stem}.dequantized"] = dequantized_logits(model, path)
    np.savez_compressed(HERE / "reference_logits.npz", **references | {"ids": np.array(IDS)})
    tokens = {path.stem: llama_cpp.tokenize(path, TEXTS) for path in sorted(HERE.glob("tiny-*-Q4_K_M.gguf"))}
    with open(HERE / "reference_tokens.json", "w") as file:
        json.dump({"texts": TEXTS, "ids": tokens}, file)


if __name__ == "__main__":
    main()
