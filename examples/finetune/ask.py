"""Ask an exported model with plain transformers: python ask.py FOLDER QUESTION."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, question = sys.argv[1:]
tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForCausalLM))
messages = [{"role": "user", "content": question}]
asked = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
answer = model.generate(**asked, max_new_tokens=20, do_sample=False)[
    0, asked["input_ids"].shape[1] :
]
print(tokenizer.decode(answer, skip_special_tokens=True))
