.PHONY: run test lint bench bench-engine bench-peers bench-speculation bench-memory bench-replay bench-kv bench-overload bench-fairness bench-cancel bench-failover bench-migration soak-kv chaos chaos-full chaos-storm chaos-kv clean venv

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
bench-overload:    ; @scripts/bench.sh overload $(ARGS)
bench-fairness:    ; @scripts/bench.sh fairness $(ARGS)
bench-cancel:      ; @scripts/bench.sh cancel $(ARGS)
bench-failover:    ; @scripts/bench.sh failover $(ARGS)
bench-migration:   ; @scripts/bench.sh migration $(ARGS)
soak-kv:           ; @scripts/bench.sh soak $(ARGS)
chaos:    ; @scripts/chaos.sh $(ARGS)
chaos-full:  ; @scripts/chaos.sh full $(ARGS)
chaos-storm: ; @scripts/chaos.sh storm $(ARGS)
chaos-kv: ; @scripts/chaos.sh kv $(ARGS)
clean: ; @scripts/clean.sh
venv:  ; @scripts/bootstrap.sh dev
