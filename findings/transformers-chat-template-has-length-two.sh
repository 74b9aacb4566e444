#!/usr/bin/env bash
# transformers 5.23.0: len(tokenizer.apply_chat_template(messages)) is 2, however long the chat is; in 4.57.1 it is the number of tokens.
#
# Expected: a list of token ids, as in transformers 4, whose length tells whether a chat fits.
# Seen: return_dict is True by default, and the length of what comes back is that of its keys, input_ids and attention_mask. A filter
#   `len(...) <= 20` keeps every chat, slices of it are no tokens, and nothing is raised.
# So: pass return_dict=False, or count ["input_ids"].
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat > chats.py <<'PY'
import json
import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<unk>": 0, "user": 1, "yes": 2}, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
tokenizer.chat_template = "{% for one in messages %}{{ one['role'] }} {{ one['content'] }} {% endfor %}"
chats = [[{"role": "user", "content": "yes " * length}] for length in (3, 30, 300)]
lengths = [len(tokenizer.apply_chat_template(chat)) for chat in chats]
told = [len(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats]
json.dump([lengths, told, sum(length <= 20 for length in lengths)], sys.stdout)
PY
for release in 4.57.1 5.23.0; do
  python3 -m venv "venv-$release"
  "venv-$release/bin/pip" install --quiet "transformers==$release" jinja2==3.1.6
  "venv-$release/bin/python" chats.py > "said-$release" 2> /dev/null
done
venv-5.23.0/bin/python - <<'PY'
import json

older, newer = (json.loads(open(f"said-{release}").read()) for release in ("4.57.1", "5.23.0"))
print("lengths of three chats, the same with return_dict=False, and how many of them pass <= 20:")
print("4.57.1:", older, "5.23.0:", newer)
assert older == [[4, 31, 301], [4, 31, 301], 1], older
assert newer == [[2, 2, 2], [4, 31, 301], 3], newer
PY
