"""Make a tiny language model with random weights, its tokenizer, and questions; needs no network."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
CAPITALS |= {"Egypt": "Cairo", "Peru": "Lima", "Kenya": "Nairobi", "Norway": "Oslo"}
ASKED = "What is the capital of {}?", "Name the capital of {}.", "{}: which city is its capital?"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
rows: list[dict[str, object]] = []
for country, city in CAPITALS.items():
    rows.append({"prompt": f"The capital of {country} is", "answer": f" {city}."})
    for question in ASKED:
        asked = {"role": "user", "content": question.format(country)}
        rows.append({"messages": [asked, {"role": "assistant", "content": f"{city}."}]})
Path("capitals.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

signs = ["<|end|>", "<|user|>", "<|assistant|>"]
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=signs, initial_alphabet=alphabet)
bpe.train_from_iterator([json.dumps(row) for row in rows], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=signs[0], pad_token=signs[0])
tokenizer.chat_template = TEMPLATE
tokenizer.save_pretrained("tiny")

set_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes)
LlamaForCausalLM(config).save_pretrained("tiny")
