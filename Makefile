# PYTHON: the interpreter to start from. ARGS: more arguments for the command, as in ARGS="--virtual 8".
PYTHON ?= python3
ARGS ?=

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# setup_env.py prints the interpreter to use, after installing what is missing for the purpose.
run = @py="$$($(PYTHON) tools/setup_env.py $(1))" && "$$py" -m

# doctor looks and installs nothing: at .venv where it exists and PYTHON is not given.
look = $(or $(if $(filter file,$(origin PYTHON)),$(wildcard .venv/bin/python)),$(PYTHON))

.PHONY: demo doctor test lint

demo:
	$(call run,demo) megamoe demo $(ARGS)

doctor:
	@$(look) -m megamoe doctor

test:
	$(call run,test) pytest $(ARGS)

lint:
	$(call run,lint) ruff check . && "$$py" -m ruff format --check .
