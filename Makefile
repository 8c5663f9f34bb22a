.PHONY: run test lint bench bench-engine bench-peers bench-speculation bench-memory bench-replay bench-kv soak-kv chaos chaos-kv clean venv

run:   ; @scripts/run.sh $(ARGS)
test:  ; @scripts/test.sh $(ARGS)
lint:  ; @scripts/lint.sh
bench: ; @scripts/bench.sh $(ARGS)
bench-engine:      ; @scripts/bench.sh engine $(ARGS)
bench-peers:       ; @scripts/bench.sh peers $(ARGS)
bench-speculation: ; @scripts/bench.sh speculation $(ARGS)
bench-memory:      ; @scripts/bench.sh memory $(ARGS)
bench-replay:      ; @scripts/bench.sh replay $(TRACE) $(ARGS)
bench-kv:          ; @scripts/bench.sh kv $(ARGS)
soak-kv:           ; @scripts/bench.sh soak $(ARGS)
chaos:    ; @scripts/chaos.sh $(ARGS)
chaos-kv: ; @scripts/chaos.sh kv $(ARGS)
clean: ; @scripts/clean.sh
venv:  ; @scripts/bootstrap.sh dev
