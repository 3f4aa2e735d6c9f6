"""The bugs that ``plant_bugs.py`` plants: each a small change of one source file of the runtime."""

# ruff: noqa: E501 - pieces of the sources stand here as they are

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
    """changes: (text, what it becomes, how often it stands there)."""

    name: str
    file: str
    changes: tuple[tuple[str, str, int], ...]


def bug(name: str, file: str, *changes: tuple[str, str] | tuple[str, str, int]) -> Bug:
    return Bug(name, file, tuple((c[0], c[1], c[2] if len(c) == 3 else 1) for c in changes))


SCHEDULER = [
    bug(
        "token budget ignored", "scheduler.py",
        ("left = limits.max_tokens - plan.tokens\n", "left = limits.max_tokens\n"),
    ),
    bug(
        "row budget ignored", "scheduler.py",
        ("rows_left = limits.max_rows - plan.logit_rows\n            if left <= 0:\n                break",
         "rows_left = limits.max_rows\n            if left <= 0:\n                break"),
    ),
    bug(
        "row budget ignored at admission", "scheduler.py",
        ("limits.max_tokens - plan.tokens, limits.max_rows - plan.logit_rows",
         "limits.max_tokens - plan.tokens, limits.max_rows"),
    ),
    bug("chunk ignored", "scheduler.py", ("cap = min(left, self.limits.chunk)", "cap = left")),
    bug(
        "admits while preempting", "scheduler.py",
        ("if self.preemptions == before and self.waiting_count:", "if self.waiting_count:"),
    ),
    bug("preempted goes to the back", "scheduler.py", ("self.waiting.appendleft(victim)", "self.waiting.append(victim)")),
    bug("the oldest is preempted", "scheduler.py", ("victim = self.running.pop()", "victim = self.running.pop(0)")),
    bug("preempted keeps computed", "scheduler.py", ("        victim.computed = 0\n", "")),
    bug("preempted keeps its blocks", "scheduler.py", ("        self.pool.release(reversed(seq.blocks))\n", "")),
    bug("preempted keeps its count of published blocks", "scheduler.py", ("        seq.published = 0\n", "")),
    bug("preempted keeps its drafts", "scheduler.py", ("        victim.drafts = []\n", "")),
    bug(
        "prompt scores begin anew after a preemption", "scheduler.py",
        ("        victim.computed = 0\n", "        victim.computed = victim.scored = 0\n"),
    ),
    bug("a row is not given back", "scheduler.py", ("        self._rows.append(seq.row)\n", "")),
    bug("one sequence too many", "scheduler.py", ("room = limits.max_seqs - len(self.running)\n        if",
                                                  "room = limits.max_seqs - len(self.running) + 1\n        if"),
        ("room = limits.max_seqs - len(self.running)\n        allowed",
         "room = limits.max_seqs - len(self.running) + 1\n        allowed")),
    bug("a full hit leaves nothing to compute", "scheduler.py", ("(len(seq.tokens) - 1) // self", "len(seq.tokens) // self")),
    bug("hits on free blocks are not accounted for", "scheduler.py", ("need + free_hits > pool.free", "need > pool.free")),
    bug("hits are not held", "scheduler.py", ("            self.pool.touch(block)\n", "            pass\n")),
    bug(
        "prompt scores take a prefix hit", "scheduler.py",
        ("if not self.limits.prefix_cache or seq.params.prompt_logprobs is not None:\n            return []",
         "if not self.limits.prefix_cache:\n            return []"),
    ),
    bug("cached tokens are told anew after a preemption", "scheduler.py", ("        if not seq.preempted:\n            seq.cached",
                                                                           "        if True:\n            seq.cached")),
    bug("rejected drafts stay computed", "scheduler.py", ("seq.computed + count - rejected", "seq.computed + count")),
    bug(
        "blocks of rejected drafts are published", "scheduler.py",
        ("full = computed // size", "full = (computed + rejected) // size"),
    ),
    bug("blocks of rejected drafts are kept", "scheduler.py", ("        if rejected:\n", "        if False:\n")),
    bug("one draft too many at the limit", "scheduler.py", ("seq.limit - known - 1)", "seq.limit - known)")),
    bug("drafts are never verified", "scheduler.py", ("                and not seq.drafts\n", "")),
    bug("one token too few of the row budget for drafts", "scheduler.py", ("rows_left - 1, seq", "rows_left, seq")),
    bug("a guess preempts a neighbour", "scheduler.py", ("if drafts and not self._can_grow(seq, count):", "if False:")),
    bug("blocks do not grow with a decode", "scheduler.py", ("                and start < len(seq.blocks) * size\n", "")),
    bug("sampled although no row is left", "scheduler.py", ("                and rows_left > 0\n", "")),
    bug(
        "prompts are cut although they are to be whole", "scheduler.py",
        ("cap = left if pending <= left else 0", "cap = min(left, pending)"),
    ),
    bug("a static batch takes newcomers", "scheduler.py", ("closed = not self.running\n", "closed = True\n")),
    bug(
        "a batch closes while a preempted member waits", "scheduler.py",
        ("if first is None or first.preempted:", "if first is None:"),
    ),
    bug("a dynamic batch does not close when full", "scheduler.py", ("self.waiting_count >= batch or ", "")),
    bug("a dynamic batch does not close by time", "scheduler.py",
        (" or self._clock() - first.arrived >= limits.max_wait", "")),
    bug("a batch is not counted down", "scheduler.py", ("                self._open -= 1\n", "")),
    bug("a batch is larger than allowed", "scheduler.py",
        ("self._open = min(self.waiting_count, batch)", "self._open = self.waiting_count")),
    bug("nobody is woken for a batch", "scheduler.py", ("else first.arrived + self.limits.max_wait", "else None")),
    bug("aborted in the queue and still counted", "scheduler.py",
        ("            self.waiting_count -= 1  # it", "            pass  # it")),
    bug("aborted in the queue and never swept", "scheduler.py", ("2 * self.waiting_count + 64", "10**9")),
    bug("the aborted front is served", "scheduler.py",
        ("while self.waiting and self.waiting[0].status is not Status.WAITING:", "while False:")),
    bug("the head is evicted before the tail", "scheduler.py",
        ("self.pool.release(reversed(seq.blocks))\n", "self.pool.release(seq.blocks)\n")),
    bug("the hash forgets its parent", "scheduler.py", ("parent = hashes[-1] if hashes else seq.root", "parent = seq.root")),
    bug("the hash of a prompt forgets its parent", "scheduler.py",
        ("            root = self.hasher.extend(root, tokens[end - size : end])\n            out.append(root)",
         "            out.append(self.hasher.extend(root, tokens[end - size : end]))")),
    bug("a row is scored that is not computed", "scheduler.py",
        ("last = min(start + count, seq.prompt_len - 1)", "last = seq.prompt_len - 1")),
    bug("one prompt row too few is scored", "scheduler.py",
        ("scores = max(0, last - max(start, seq.scored))", "scores = max(0, last - max(start, seq.scored) - 1)")),
    bug("a request that can never fit is taken", "scheduler.py",
        ("stored = max(prompt_len, limit - 1)", "stored = prompt_len")),
]  # fmt: skip

BLOCKS = [
    bug("stale hash after eviction", "blocks.py", ("            self._forget(block)\n        self.ref[block] = 1",
                                                   "        self.ref[block] = 1")),
    bug("hash forgotten by the block alone", "blocks.py", ("            del self.by_hash[digest]\n", "")),
    bug("the longest unused goes last", "blocks.py", ("next(iter(self._cached))", "next(reversed(self._cached))")),
    bug("content goes before blank blocks", "blocks.py", ("        if self._blank:\n", "        if not self._cached:\n")),
    bug("a hit stays in the queue", "blocks.py", ("            del self._cached[block]\n        self.ref[block] += 1",
                                                 "            pass\n        self.ref[block] += 1")),
    bug("a shared block is freed by its first holder", "blocks.py", ("            if self.ref[block] == 0:\n                if",
                                                                     "            if True:\n                if")),
    bug("content is lost on release", "blocks.py", ("                if self.hash_of[block] is None:\n                    self._blank",
                                                    "                if True:\n                    self._blank")),
    bug("the younger of equal blocks is found", "blocks.py", (" and digest not in self.by_hash:", ":")),
    bug("the hash ignores what came before", "blocks.py", ("digest_size=ROOT_BYTES, key=parent)", "digest_size=ROOT_BYTES)")),
    bug("the hash ignores the salt", "blocks.py", ("for part in (salt.encode(), adapter.encode()):", "for part in (adapter.encode(),):")),
    bug("salt and adapter run together", "blocks.py", ("len(part).to_bytes(8, \"little\") + part", "part")),
    bug("no secret in the hash", "blocks.py", ("os.urandom(32)", "bytes(32)")),
    bug("a reserved block is given away", "blocks.py", ("dict.fromkeys(range(reserved, blocks))", "dict.fromkeys(range(reserved - 1, blocks))")),
]  # fmt: skip

RESULTS = [
    bug("a wrong draft is accepted", "results.py", (" or token != drafts[at]:", ":")),
    bug("no token after the last accepted draft", "results.py", ("at == len(drafts) or", "at + 1 >= len(drafts) or")),
    bug("one draft too many counts as rejected", "results.py", ("len(drafts) - (len(tokens) - 1))", "len(drafts) - len(tokens) + 2)")),
    bug("one rejected draft counts as accepted", "results.py", ("len(drafts) - (len(tokens) - 1))", "max(len(drafts) - len(tokens), 0))")),
    bug("max_tokens ignored", "results.py", ("        elif len(tokens) >= seq.limit:\n", "        elif len(tokens) > seq.limit:\n")),
    bug("max_tokens ignored within drafts", "results.py", ("            elif len(seq.tokens) >= seq.limit:\n", "            elif False:\n")),
    bug("a stop id within drafts ignored", "results.py", ("            if token in seq.stop_ids and", "            if False and")),
    bug("a stop id ignored", "results.py", ("        if token in seq.stop_ids and len(tokens)", "        if False and len(tokens)")),
    bug("min_tokens ignored", "results.py", (" and len(tokens) - seq.prompt_len > seq.params.min_tokens", "")),
    bug("min_tokens ignored within drafts", "results.py", (" and len(seq.tokens) - seq.prompt_len > seq.params.min_tokens", "")),
    bug("penalties miss a token", "results.py", ("        if seq.edits is not None:\n            seq.edits.append(token)\n", "")),
    bug("penalties miss accepted drafts", "results.py",
        ("            if seq.edits is not None:\n                seq.edits.append(token)\n", "")),
    bug("KV without finite logits is published", "results.py",
        ("        if token < 0:\n            return self._failed(seq)\n        tokens",
         "        if token < 0:\n            self._scheduler.advance(seq, count, 0)\n            return self._failed(seq)\n        tokens")),
    bug("a failed row after right drafts fails the request at once", "results.py",
        ("                if not tokens:\n                    return self._failed(seq)\n                break",
         "                return self._failed(seq)")),
    bug("scores without finite logits are handed out", "results.py", ("return min(ids) >= 0", "return True")),
    bug("prompt scores of the wrong token", "results.py", ("seq.tokens[position], wants", "seq.tokens[position - 1], wants")),
    bug("scored rows are taken for sampled ones", "results.py", ("sampled = ids[row + scored : row + n_rows]", "sampled = ids[row : row + n_rows - scored]")),
    bug("log-probabilities of the next row", "results.py",
        ("rows = [next(logprobs) for _ in sampled] if", "rows = [next(logprobs) for _ in sampled][::-1] if")),
    bug("a prompt without output never ends", "results.py", ("if len(seq.tokens) >= seq.limit and seq.computed == len(seq.tokens):", "if False:")),
    bug("used drafts stay", "results.py", ("        seq.drafts = []\n", "")),
    bug("rows are not passed over", "results.py", ("            row += n_rows\n        return", "            row += 1\n        return")),
]  # fmt: skip

STEP = [
    bug("the uniform of the position before", "step.py", ("draws.append(self._uniform(seq, end))", "draws.append(self._uniform(seq, end - 1))")),
    bug("drafted rows share one uniform", "step.py", ("self._uniform(seq, position + j)", "self._uniform(seq, position)")),
    bug("uniforms of the sequence before in this row", "step.py", ("        self._ahead[row] = []\n", "")),
    bug("all choices draw the same", "step.py", ("uniforms(seq.seed, seq.index, position, AHEAD)", "uniforms(seq.seed, 0, position, AHEAD)")),
    bug("the seed is ignored", "step.py", ("uniforms(seq.seed, seq.index, position, AHEAD)", "uniforms(0, seq.index, position, AHEAD)")),
    bug("uniforms made ahead begin one late", "step.py", ("self._ahead_from[row] = position\n", "self._ahead_from[row] = position + 1\n")),
    bug("parameters of the sequence before in this row", "step.py", ("if owner[row] is not seq:", "if owner[row] is None:")),
    bug("drafted rows do not see the drafts in penalties", "step.py",
        ("seq.edits.rows(output_len, drafts)", "[seq.edits.rows(output_len, [])[0] for _ in range(sampled)]")),
    bug("penalties only on the first drafted row", "step.py", ("seq.edits.rows(output_len, drafts)", "seq.edits.rows(output_len, [])")),
    bug("edits in the wrong row", "step.py", ("edits.append((r + scored + j, entry))", "edits.append((r + j, entry))")),
    bug("scored rows ask for the token itself", "step.py", ("seq.tokens[at + 1 : at + 1 + scored]", "seq.tokens[at : at + scored]")),
    bug("log-probabilities of scored rows", "step.py", ("range(r + scored, r + scored + sampled)", "range(r, r + sampled)")),
    bug("log-probabilities after the edits", "step.py",
        ('own = ops.gather_rows(logits, inputs["lp_rows"]) if key.logprobs >= 0 else None', "own = None"),
        ("        if own is not None:\n", '        if key.logprobs >= 0:\n            own = ops.gather_rows(logits, inputs["lp_rows"])\n')),
    bug("padding of the vocabulary is drawn", "step.py", ("drawn = logits[:, :sample_width] if padded else logits", "drawn = logits")),
    bug("a step of scores is not greedy", "step.py", ("return sampled == 0", "return False")),
    bug("a step with one greedy request is greedy", "step.py", ("                    greedy = False\n", "                    greedy = b > 0\n")),
    bug("drafts are not fed to the model", "step.py", ("(seq.tokens[start:end] + seq.drafts)[:count]", "(seq.tokens[start:end] + [0] * count)[:count]")),
    bug("slots ignore where a chunk starts", "step.py", ("slots[t] = seq.blocks[start // size] * size + start % size", "slots[t] = seq.blocks[-1] * size + start % size + (count > 9)")),
    bug("slots of another row", "step.py", ("self._scheduler.table[row].take(at // size)", "self._scheduler.table[b].take(at // size)")),
    bug("tables of another row", "step.py", ("            table_rows.append(row)\n", "            table_rows.append(b)\n")),
    bug("this step's tokens are not in the lengths", "step.py", ("            seq_lens[b] = end\n", "            seq_lens[b] = start\n")),
    bug("fewer best tokens than asked for", "step.py", ("if size >= n)", "if size >= n - 1)")),
    bug("edits of the step before", "step.py", ("        if total == 0:\n            return 0\n", "")),
    bug("the edit list is too short", "step.py", ('        buffer.counts[5] = total\n', '        buffer.counts[5] = total - 1\n')),
]  # fmt: skip

EDITS = [
    bug("supposed tokens are not taken back", "edits.py", ("            self._undo(draft)\n", "            pass\n")),
    bug("factors of supposed tokens stay", "edits.py", ("        self.factor[:known] = factors\n", "")),
    bug("places of supposed tokens stay", "edits.py", ("            del self._place[token]\n", "            pass\n")),
    bug("a list that grew is written in its old place", "edits.py",
        ("                at = self._entry(token)  # before the array is looked up: it may be replaced by a larger one\n"
         "                self.factor[at] = params.repetition_penalty\n",
         "                factor = self.factor\n"
         "                factor[self._entry(token) % len(factor)] = params.repetition_penalty\n")),
    bug("the prompt counts for presence", "edits.py",
        ("                self.factor[at] = params.repetition_penalty\n", "                self.append(token)\n")),
    bug("the repetition penalty is applied once per token", "edits.py",
        ("                self.factor[at] = params.repetition_penalty\n", "                self.factor[at] *= params.repetition_penalty\n")),
    bug("a stop id is banned one token too long", "edits.py", ("if output_len < self.params.min_tokens:", "if output_len <= self.params.min_tokens:")),
    bug("a stop id is banned for the first row alone", "edits.py", ("self._row(output_len + at + 1)", "self._row(output_len + at + 99)")),
    bug("a penalty replaces the bias", "edits.py",
        ("        self.bias[at] = p.logit_bias.get(token, 0.0) - p.presence_penalty - count * p.frequency_penalty\n\n",
         "        self.bias[at] = -p.presence_penalty - count * p.frequency_penalty\n\n")),
    bug("the frequency does not count", "edits.py", ("- count * p.frequency_penalty\n\n", "- p.frequency_penalty\n\n")),
    bug("rows share their arrays", "edits.py", ("return self.ids[:n].copy(), self.factor[:n].copy(), bias", "return self.ids[:n], self.factor[:n], bias")),
    bug("nothing to edit with a bias alone", "edits.py", ("        or params.logit_bias\n", "")),
]  # fmt: skip

ENGINE = [
    bug("the salt is ignored", "engine.py", ("hasher.root(request.cache_salt)", "hasher.root()")),
    bug("ends of the model are not ignored", "engine.py", ("(frozenset() if params.ignore_eos else self.eos_ids)", "self.eos_ids")),
    bug("ends of the model are not ends", "engine.py", ("(frozenset() if params.ignore_eos else self.eos_ids)", "frozenset()")),
    bug("all choices are the first", "engine.py", ("limit=limit, index=index,", "limit=limit, index=0,")),
    bug("choices share their penalties", "engine.py",
        ("            edits = EditState(params, request.prompt, stop_ids) if needs_edits(params) else None\n",
         "            edits = (\n                (handle.sequences[0].edits if handle.sequences else EditState(params, request.prompt, stop_ids))\n"
         "                if needs_edits(params)\n                else None\n            )\n")),
    bug("every request has the same seed", "engine.py", ("draw_seed() if params.seed is None", "7 if params.seed is None")),
    bug("an abort of one choice ends all", "engine.py", ("if index in (None, seq.index) and", "if")),
    bug("an abort ends what has ended", "engine.py", (" and seq.status is not Status.FINISHED:\n                    # one", ":\n                    # one")),
    bug("a choice whose text is complete counts as given up", "engine.py", ('"abort" if index is None else "stop")', '"abort")')),
    bug("an abort comes before its request", "engine.py",
        ("        while self._inbox:\n            handle = self._inbox.popleft()\n            for seq in handle.sequences:\n                self.scheduler.add(seq)\n        for _ in range(aborts):",
         "        for _ in range(aborts):"),
        ('"abort" if index is None else "stop")\n',
         '"abort" if index is None else "stop")\n        while self._inbox:\n            handle = self._inbox.popleft()\n'
         "            for seq in handle.sequences:\n                self.scheduler.add(seq)\n")),
    bug("capacity is not given back", "engine.py", ("            self._live -= 1\n", "            pass\n")),
    bug("no limit to the queue", "engine.py", ("if queue_limit and request.params.n > room and self._live:", "if False:")),
    bug("a request of many choices is refused for ever", "engine.py", ("request.params.n > room and self._live:", "request.params.n > room:")),
    bug("taken while it ends", "engine.py", ("            self._check_ready()  # again", "            pass  # again")),
    bug("statistics are not a snapshot", "engine.py", ("replace(self._stats), self.scheduler", "self._stats, self.scheduler")),
    bug("what waits is forgotten at the end", "engine.py", ("[*self.scheduler.running, *self.scheduler.waiting]", "list(self.scheduler.running)")),
    bug("what has just come is forgotten at the end", "engine.py", ("            left = list(self._inbox)\n", "            left: list[RequestHandle] = []\n")),
    bug("a failure is silent", "engine.py", ("            self._end_all(\"the engine failed; see its log\")\n", "            pass\n")),
    bug("a step that ended looks stuck", "engine.py", ("        stats.last_step_tokens = plan.tokens\n        self._busy_since = 0.0\n",
                                                       "        stats.last_step_tokens = plan.tokens\n"),
        ("        if not plan.seqs:\n            self._busy_since = 0.0\n", "        if not plan.seqs:\n")),
    bug("a step that hangs is not seen", "engine.py", ("        self._busy_since = time.monotonic()\n", "")),
    bug("the last events are not handed out", "engine.py",
        ('        """Nothing to compute: hand out what is left and wait for work."""\n        self._hand_out()\n',
         '        """Nothing to compute: hand out what is left and wait for work."""\n')),
    bug("nobody wakes the engine", "engine.py", ("            self._inbox.append(handle)\n        self._wake.set()\n", "            self._inbox.append(handle)\n")),
    bug("a batch that closes by itself is slept through", "engine.py", ("_IDLE if at is None else", "_IDLE if True else")),
    bug("never idle", "engine.py", ("                    self._idle.set()\n", "                    pass\n")),
    bug("idle too early", "engine.py", ("if not self._inbox and self._live == 0:", "if True:"),
        ("            self._idle.clear()\n", "")),
    bug("observers hear of every choice", "engine.py", ("if handle.running == 0 and self.observers:", "if self.observers:")),
    bug("an observer's failure is everybody's", "engine.py", ("            except Exception:  # a faulty metric", "            except ZeroDivisionError:  # a faulty metric")),
    bug("a request that never ran hides one that did", "engine.py", ("for seq in handle.sequences if seq.scheduled), default", "for seq in handle.sequences), default")),
    bug("a first token where none was wanted", "engine.py", ("if event.tokens and not handle.first_token:", "if not handle.first_token:")),
    bug("prompt scores come with every choice", "engine.py", ("if seq.index == 0 and seq.prompt_logprobs is not None:", "if seq.prompt_logprobs is not None:")),
    bug("cached tokens are not told", "engine.py", ("        event.cached_tokens = seq.cached\n", "")),
    bug("the token that stopped is not named", "engine.py", ("result.tokens[-1] if result.reason == \"stop\" else None", "None")),
    bug("accepted drafts are counted with their successor", "engine.py", ("stats.accepted_tokens += len(result.tokens) - 1", "stats.accepted_tokens += len(result.tokens)")),
    bug("padding of the table is a token", "engine.py", ("min(vocab_size or model.vocab_size, model.vocab_size)", "model.vocab_size")),
]  # fmt: skip

BUGS = SCHEDULER + BLOCKS + RESULTS + STEP + EDITS + ENGINE

SURVIVES: dict[str, str] = {}
"""Bugs that change nothing that could be observed, and why."""
