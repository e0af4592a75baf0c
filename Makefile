# Everything is fetched and started by scripts/, below .dev/; see the README.

.PHONY: help demo test clean

help:
	@echo 'make demo [EVENTS=n] [RATE=n]   watch orders become messages; ends after n events, else at Ctrl-C'
	@echo 'make test                       everything that must hold: format, lints, docs, all tests'
	@echo 'make clean                      remove what was fetched and built'

demo:
	@EVENTS='$(EVENTS)' RATE='$(RATE)' scripts/demo.sh

test:
	@scripts/test.sh

clean:
	rm -rf .dev target
