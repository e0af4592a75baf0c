//! `make bench`: every contender drains the same log, in turn, several times; then latency, start-up, an
//! outage of Kafka, and growth. Writes `target/bench/results.json`, `benchmarks.md` and charts.
//!
//! Run by `cargo test` it is the check that it still works: a small backlog, two contenders.

mod arrivals;
mod backlog;
mod contenders;
mod drain;
mod figures;
mod latency;
mod mock;
mod poll;
mod processes;
mod report;
mod site;
#[path = "../it/support/mod.rs"]
#[allow(dead_code)] // the tests use the rest
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use backlog::{Backlog, Workload};
use contenders::{Contender, Transport};
use figures::Figure;
use site::Site;
use support::servers;
use support::tally::Counts;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    match words[..] {
        ["mock-broker", topic] => mock::serve(topic),
        ["worker-for-the-mock-broker", config] => mock::work(Path::new(config)),
        ["poller", url, brokers, topic] => poll::work(url, brokers, topic),
        // `cargo bench` says so; `cargo test` does not.
        _ if words.contains(&"--bench") => return bench(&Plan::from_environment()),
        _ => return check(),
    }
    ExitCode::SUCCESS
}

/// What was asked for.
struct Plan {
    quick: bool,
    rounds: u64,
    /// Of the workloads with small events.
    events: u64,
    /// Paths such as `drain/tcp/single/outbox-tailer`; one selects all that begins so, `*` is any part.
    only: Vec<String>,
    output: PathBuf,
    command: String,
}

impl Plan {
    fn from_environment() -> Self {
        let text = |name| std::env::var(name).ok().filter(|v| !v.is_empty());
        let number =
            |name| text(name).map(|v: String| v.parse::<u64>().unwrap_or_else(|_| panic!("{name}={v}")));
        let quick = number("QUICK").is_some_and(|n| n != 0);
        let given = ["QUICK", "EVENTS", "ROUNDS", "ONLY"]
            .into_iter()
            .filter_map(|name| Some(format!(" {name}='{}'", text(name)?)));
        Plan {
            quick,
            rounds: number("ROUNDS").unwrap_or(if quick { 1 } else { 3 }),
            events: number("EVENTS").unwrap_or(if quick { 200_000 } else { 2_000_000 }),
            only: text("ONLY").unwrap_or_default().split([' ', ',']).map(str::to_owned).collect(),
            output: Path::new(servers::ROOT).join("target/bench"),
            command: format!("make bench{}", given.collect::<String>()),
        }
    }

    fn wants(&self, path: &str) -> bool {
        let matches = |only: &String| {
            let mut parts = path.split('/');
            only.split('/').all(|wanted| parts.next().is_none_or(|part| wanted == "*" || wanted == part))
        };
        let mut only = self.only.iter().filter(|o| !o.is_empty()).peekable();
        only.peek().is_none() || only.any(matches)
    }

    fn workloads(&self) -> Vec<Workload> {
        let events = self.events;
        let small = |name, says, transaction_events| Workload {
            name,
            says,
            events,
            transaction_events,
            fill_bytes: 180,
        };
        vec![
            small("single", "single-event transactions", 1),
            small("batched", "transactions of 1,000", 1_000),
            Workload {
                name: "large",
                says: "10 KB, single-event transactions",
                events: events / 20,
                transaction_events: 1,
                fill_bytes: 10_000,
            },
            small("one", "one transaction", events),
        ]
    }

    /// Who drains this workload, and how it is reached.
    fn drains(&self, workload: &Workload, site: &Site) -> Vec<(Transport, Contender)> {
        use Contender::{Debezium, Floor, Tailer, TailerMock};
        let of_small = ["single", "batched"].contains(&workload.name);
        let mut all = vec![(Transport::Tcp, Floor), (Transport::Tcp, Tailer)];
        if site.connect.is_ok() {
            all.push((Transport::Tcp, Debezium));
        }
        if of_small {
            all.push((Transport::Tcp, TailerMock));
            all.extend([(Transport::Unix, Floor), (Transport::Unix, Tailer)]);
            if site.veth.is_ok() {
                all.extend([(Transport::Veth, Floor), (Transport::Veth, Tailer)]);
            }
        }
        all.retain(|(transport, contender)| self.wants(&path("drain", *transport, workload, *contender)));
        all
    }
}

fn path(experiment: &str, transport: Transport, workload: &Workload, contender: Contender) -> String {
    format!("{experiment}/{}/{}/{}", transport.name(), workload.name, contender.name())
}

/// Figures as they come; written after each, so that a run that is broken off leaves what it has.
struct Report<'a> {
    plan: &'a Plan,
    about: Vec<String>,
    figures: Vec<Figure>,
    warm: bool,
}

impl Report<'_> {
    fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
        report::write(&self.plan.output, &self.figures, &self.about);
    }
}

fn bench(plan: &Plan) -> ExitCode {
    if let Some(reason) = servers::missing() {
        eprintln!("no benchmark here: {reason}");
        return ExitCode::FAILURE;
    }
    site::stop_servers_on_signals();
    let drained = plan.workloads().into_iter().map(|w| format!("drain/tcp/{}", w.name));
    let steady = latency::RATES_PER_S.iter().map(|(_, name)| format!("latency/tcp/{name}"));
    let start = [format!("startup/tcp/{}", latency::FIRST_MESSAGE)];
    let mut of_debezium = drained.chain(steady).chain(start).map(|p| format!("{p}/debezium"));
    let wants_connect = of_debezium.any(|path| plan.wants(&path));
    let wants_veth = plan.wants("drain/veth");
    let site = Site::new(wants_veth, wants_connect);
    let mut about = vec![processes::machine(), contenders::versions(&site), format!("`{}`", plan.command)];
    if let (true, Err(why)) = (wants_connect, &site.connect) {
        about.push(format!("without Debezium: {why}"));
    }
    if let (true, Err(why)) = (wants_veth, &site.veth) {
        about.push(format!("without a veth pair: {why}"));
    }
    about.iter().for_each(|line| println!("{line}"));
    let mut report = Report { plan, about, figures: Vec::new(), warm: false };

    for workload in plan.workloads() {
        let drains = plan.drains(&workload, &site);
        let outage = workload.name == "single" && plan.wants("outage/tcp/single/outbox-tailer");
        if !drains.is_empty() || outage {
            let mut backlog = Backlog::load(backlog::server(site.veth.as_ref().ok()), workload);
            rounds(&mut report, &drains, &mut backlog, &site, "drain");
            if outage {
                let seconds = if plan.quick { 5 } else { 30 };
                let what = path("outage", Transport::Tcp, &workload, Contender::Tailer);
                report.add(attempt(&what, || drain::outage(&mut backlog, &site, seconds)));
            }
        }
    }
    for workload in plan.workloads().into_iter().take(2) {
        let mut drains = vec![(Transport::Tls, Contender::Floor), (Transport::Tls, Contender::Tailer)];
        drains.retain(|(t, c)| plan.wants(&path("drain", *t, &workload, *c)));
        if !drains.is_empty() {
            let mut backlog = Backlog::load(backlog::tls_server(), workload);
            rounds(&mut report, &drains, &mut backlog, &site, "drain");
        }
    }
    if plan.wants("drain/tcp/pending/reference-poller") {
        let events = plan.events.min(20_000);
        let workload = Workload { name: "pending", says: "", events, transaction_events: 1, fill_bytes: 180 };
        report.add(attempt("drain/tcp/pending/reference-poller", || poll::poll(workload, &site)));
    }
    let mut steady = vec![Contender::Tailer];
    if site.connect.is_ok() {
        steady.push(Contender::Debezium);
    }
    for rate in latency::RATES_PER_S {
        for contender in &steady {
            let what = format!("latency/tcp/{}/{}", rate.1, contender.name());
            if plan.wants(&what) {
                let (seconds, warm_up_s) = if plan.quick { (5, 3) } else { (30, 10) };
                let run = || latency::latency(*contender, rate, seconds, warm_up_s, &site);
                report.add(attempt(&what, run));
            }
        }
    }
    for contender in &steady {
        let what = format!("startup/tcp/{}/{}", latency::FIRST_MESSAGE, contender.name());
        if plan.wants(&what) {
            let times = if *contender == Contender::Tailer { 10_u64 } else { 3 };
            let times = if plan.quick { times.div_ceil(3) } else { times };
            report.add(attempt(&what, || latency::start_up(*contender, times, &site)));
        }
    }
    // Loading ten million events takes long: never in a quick run that did not ask for it.
    if plan.wants("growth") && !(plan.quick && plan.only.iter().all(String::is_empty)) {
        for (name, events) in [("batched-short", plan.events / 2), ("batched-long", plan.events * 5)] {
            let workload = Workload {
                name,
                says: "transactions of 1,000",
                events,
                transaction_events: 1_000,
                fill_bytes: 180,
            };
            let mut backlog = Backlog::load(backlog::server(None), workload);
            rounds(&mut report, &[(Transport::Tcp, Contender::Tailer)], &mut backlog, &site, "growth");
        }
    }
    finish(&report)
}

/// Every contender in turn, several times.
fn rounds(
    report: &mut Report<'_>,
    drains: &[(Transport, Contender)],
    backlog: &mut Backlog,
    site: &Site,
    experiment: &str,
) {
    if !report.warm && !drains.is_empty() {
        // The broker is compiled while it works, on the same two cores: that is no contender's fault.
        drain::drain(Contender::Tailer, Transport::Tcp, backlog, site);
        report.warm = true;
    }
    let mut of_each: Vec<Vec<Figure>> = vec![Vec::new(); drains.len()];
    for _ in 0..report.plan.rounds {
        let mut round = Vec::new();
        for (transport, contender) in drains {
            let what = path(experiment, *transport, &backlog.workload, *contender);
            let mut figure = attempt(&what, || {
                let mut figure = drain::drain(*contender, *transport, backlog, site);
                experiment.clone_into(&mut figure.experiment);
                figure.compare(&round);
                figure
            });
            figure.events = backlog.workload.events;
            round.push(figure);
        }
        // Debezium may come after what is compared with it.
        for at in 0..round.len() {
            let mut figure = round[at].clone();
            figure.compare(&round);
            of_each[at].push(figure);
        }
    }
    of_each
        .iter()
        .filter(|rounds| !rounds.is_empty())
        .for_each(|rounds| report.add(Figure::of_rounds(rounds)));
}

/// A run that fails must not take the others with it.
fn attempt(path: &str, run: impl FnOnce() -> Figure) -> Figure {
    let figure = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        let mut parts = path.split('/');
        let [experiment, transport, workload, contender] = [(); 4].map(|()| parts.next().unwrap_or_default());
        let mut figure = Figure::new(experiment, contender, transport, workload);
        figure.fail(text.as_deref().unwrap_or("panic"));
        figure
    });
    println!("{}", figure.line());
    figure
}

fn finish(report: &Report<'_>) -> ExitCode {
    let failed: Vec<&Figure> = report.figures.iter().filter(|f| f.failed.is_some()).collect();
    for figure in &failed {
        eprintln!("does not count: {}", figure.line());
    }
    println!("{} figures in {}", report.figures.len(), report.plan.output.display());
    if failed.is_empty() && !report.figures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The harness still works: it runs to the end, and `results.json` has what it must have.
fn check() -> ExitCode {
    let plan = Plan {
        quick: true,
        rounds: 1,
        events: 5_000,
        only: ["pg_recvlogical", "outbox-tailer"].map(|c| format!("drain/tcp/single/{c}")).to_vec(),
        output: Path::new(servers::ROOT).join("target/bench/check"),
        command: "cargo test --bench bench".to_owned(),
    };
    if let (Some(reason), None) = (servers::missing(), std::env::var_os("OUTBOX_TESTS_MUST_RUN")) {
        println!("not checked: {reason}");
        return ExitCode::SUCCESS;
    }
    if bench(&plan) != ExitCode::SUCCESS {
        return ExitCode::FAILURE;
    }
    let text = std::fs::read_to_string(plan.output.join("results.json")).unwrap();
    let figures: Vec<serde_json::Map<String, serde_json::Value>> = serde_json::from_str(&text).unwrap();
    assert_eq!(figures.len(), 2);
    for name in [
        "contender",
        "transport",
        "workload",
        "events_per_s",
        "cpu_us_per_event",
        "rss_peak_bytes",
        "ratio_to_floor",
    ] {
        assert!(figures.iter().all(|f| !f[name].is_null()), "{name}: {text}");
    }
    for name in ["lost", "inverted", "repeats"] {
        assert_eq!(figures[1][name], 0, "{name}: {text}");
    }
    // A run that loses anything fails the whole benchmark.
    let mut lossy = Figure::default();
    lossy.count(Counts { lost: 1, ..Counts::default() });
    let report = Report { plan: &plan, about: Vec::new(), figures: vec![lossy], warm: true };
    assert_eq!(finish(&report), ExitCode::FAILURE);
    ExitCode::SUCCESS
}
