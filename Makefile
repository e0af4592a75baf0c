# Everything is fetched and started by scripts/, below .dev/; see the README.

.PHONY: help demo test sim fuzz torture bench bench-instructions clean

help:
	@echo 'make demo [EVENTS=n] [RATE=n]   watch orders become messages; ends after n events, else at Ctrl-C'
	@echo 'make test                       everything that must hold: format, lints, docs, all tests'
	@echo 'make sim [SEEDS=n] [SEED=first]  n histories in the simulator; TRACE=1 tells them step by step'
	@echo 'make fuzz [TARGET=t] [SECONDS=n]  libFuzzer on what reads bytes of others; a minute for each target'
	@echo 'make torture [KILLS=n] [PG=n] [BROKER=n] [PROMOTIONS=n] [SEED=n]'
	@echo '                                kill the worker and its servers under load; nothing may be lost'
	@echo 'make torture ROWS=n | BACKLOG=n [AS_MB=n]   memory: one transaction, or a backlog of Kafka'
	@echo 'make bench [QUICK=1] [ONLY=path]  measure against pg_recvlogical and Debezium (about an hour)'
	@echo 'make bench-instructions         instructions of each stage of the core, against those on record'
	@echo 'make clean                      remove what was fetched and built'

demo:
	@EVENTS='$(EVENTS)' RATE='$(RATE)' scripts/demo.sh

test:
	@scripts/test.sh

sim:
	@SEEDS='$(or $(SEEDS),100000)' SEED='$(SEED)' TRACE='$(TRACE)' RUST_BACKTRACE=0 \
		cargo test --quiet --release --no-default-features --test sim -- --nocapture every_history

fuzz:
	@scripts/fuzz.sh run '$(TARGET)' '$(or $(SECONDS),60)'

torture:
	@KILLS='$(KILLS)' PG='$(PG)' BROKER='$(BROKER)' PROMOTIONS='$(PROMOTIONS)' SEED='$(SEED)' \
		ROWS='$(ROWS)' BACKLOG='$(BACKLOG)' AS_MB='$(AS_MB)' scripts/torture.sh

bench:
	@QUICK='$(QUICK)' ONLY='$(ONLY)' EVENTS='$(EVENTS)' ROUNDS='$(ROUNDS)' scripts/bench.sh

bench-instructions:
	@RECORD='$(RECORD)' cargo bench --quiet --no-default-features --bench instructions

clean:
	rm -rf .dev target
