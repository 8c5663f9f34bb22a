.PHONY: run test lint bench chaos clean venv

run:   ; @scripts/run.sh $(ARGS)
test:  ; @scripts/test.sh $(ARGS)
lint:  ; @scripts/lint.sh
bench: ; @scripts/bench.sh $(ARGS)
chaos: ; @scripts/chaos.sh $(ARGS)
clean: ; @scripts/clean.sh
venv:  ; @scripts/bootstrap.sh dev
