//! `results.json`, and what people read: tables in Markdown and charts in SVG, all from the figures.

use std::fmt::Write as _;
use std::path::Path;

use crate::figures::Figure;

pub fn write(folder: &Path, figures: &[Figure], about: &[String]) {
    std::fs::create_dir_all(folder).unwrap();
    let put = |name: &str, text: String| std::fs::write(folder.join(name), text).unwrap();
    put("results.json", serde_json::to_string_pretty(figures).unwrap() + "\n");
    put("benchmarks.md", markdown(figures, about));
    for (name, title, unit, get) in CHARTS {
        if let Some(svg) = chart(figures, name, title, unit, *get) {
            put(&format!("{name}.svg"), svg);
        }
    }
}

type Get = fn(&Figure) -> Option<f64>;

/// File, title, unit, and what of which figure.
const CHARTS: &[(&str, &str, &str, Get)] = &[
    ("drain", "Draining a backlog", "thousand events/s", |f| {
        (f.experiment == "drain").then(|| Some(f.events_per_s? / 1e3))?
    }),
    ("cpu", "Processor time of the contender while draining", "µs an event", |f| {
        (f.experiment == "drain").then_some(f.cpu_us_per_event)?
    }),
    ("memory", "Peak memory", "MB", |f| {
        (["drain", "outage"].contains(&f.experiment.as_str()))
            .then(|| Some(f.rss_peak_bytes? as f64 / 1e6))?
    }),
    ("latency-p50", "COMMIT to readable, median", "ms", |f| {
        (f.experiment == "latency").then_some(f.p50_ms)?
    }),
    ("latency-p99", "COMMIT to readable, 99 of 100", "ms", |f| {
        (f.experiment == "latency").then_some(f.p99_ms)?
    }),
    ("startup", "Start of the process to first message", "ms", |f| {
        (f.experiment == "startup").then_some(f.p50_ms)?
    }),
];

fn markdown(figures: &[Figure], about: &[String]) -> String {
    let mut text =
        "# Benchmarks\n\nMade by `make bench`; how to read the figures is said above each table.\n\n"
            .to_owned();
    for line in about {
        writeln!(text, "- {line}").unwrap();
    }
    let of = |experiment: &str| figures.iter().filter(|f| f.experiment == experiment).collect::<Vec<_>>();
    let section = |text: &mut String, title: &str, says: &str, charts: &[&str]| {
        writeln!(text, "\n## {title}\n\n{says}\n").unwrap();
        for name in charts {
            if CHARTS.iter().any(|c| c.0 == *name && chart(figures, c.0, c.1, c.2, c.3).is_some()) {
                writeln!(text, "![{title}]({name}.svg)\n").unwrap();
            }
        }
    };

    let drains = of("drain");
    if !drains.is_empty() {
        section(
            &mut text,
            "Draining a backlog",
            "Every contender drains a copy of the same slot, in turn. Events per second count from the moment it has \
             the slot to the broker's time of appending the last message (`pg_recvlogical`: to its end). Medians of \
             the rounds; a ratio is the median of the ratios within each round. Processor time is user and system \
             time of the whole process, its start included. `outbox-tailer-mock` publishes to librdkafka's mock broker, \
             which keeps only the newest messages: those are counted, not read.",
            &["drain", "cpu", "memory"],
        );
        text.push_str("| transport | workload | contender | events/s | × floor | × Debezium | CPU µs/event | × walsender's | × Debezium's | walsender µs/event | broker µs/event | peak MB | lost / inverted / repeats |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
        for f in drains {
            let oracle = match (f.lost, f.repeats) {
                (Some(lost), Some(repeats)) => {
                    format!(
                        "{lost} / {} / {repeats}",
                        f.inverted.map_or_else(|| "–".to_owned(), |n| n.to_string())
                    )
                }
                _ => "–".to_owned(),
            };
            writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {oracle}{} |",
                f.transport,
                f.workload,
                f.contender,
                cell(f.events_per_s, 0),
                cell(f.ratio_to_floor, 2),
                cell(f.ratio_to_debezium, 2),
                cell(f.cpu_us_per_event, 2),
                cell(f.cpu_ratio_to_walsender, 2),
                cell(f.cpu_ratio_to_debezium, 3),
                cell(f.walsender_cpu_us_per_event, 2),
                cell(f.broker_cpu_us_per_event, 2),
                cell(f.rss_peak_bytes.map(|b| b as f64 / 1e6), 1),
                failure(f),
            )
            .unwrap();
        }
        let cold =
            figures.iter().filter(|f| f.contender == "debezium" && f.first_100_000_events_per_s.is_some());
        for f in cold {
            writeln!(
                text,
                "\nDebezium, {}, its first 100,000 events from cold: {} events/s.",
                f.workload,
                cell(f.first_100_000_events_per_s, 0)
            )
            .unwrap();
        }
    }
    let latencies = of("latency");
    if !latencies.is_empty() {
        section(
            &mut text,
            "Latency",
            "Single-event transactions at a fixed rate, `synchronous_commit = on`. From the return of COMMIT to the \
             moment a consumer has the message; in brackets from the moment the INSERT was sent. The message can be \
             there before COMMIT returns: then the figure is negative.",
            &["latency-p50", "latency-p99"],
        );
        text.push_str("| rate | contender | p50 ms | p99 ms | max ms | CPU µs/event | reached/s |\n|---|---|---|---|---|---|---|\n");
        for f in latencies {
            writeln!(
                text,
                "| {} | {} | {} ({}) | {} ({}) | {} | {} | {}{} |",
                f.workload,
                f.contender,
                cell(f.p50_ms, 2),
                cell(f.p50_from_send_ms, 2),
                cell(f.p99_ms, 2),
                cell(f.p99_from_send_ms, 2),
                cell(f.max_ms, 1),
                cell(f.cpu_us_per_event, 1),
                cell(f.rate_per_s, 0),
                failure(f),
            )
            .unwrap();
        }
    }
    let starts = of("startup");
    if !starts.is_empty() {
        let says = "One event is waiting; from the start of the process to the moment a consumer has it.";
        section(&mut text, "Start-up", says, &["startup"]);
        text.push_str("| contender | starts | median ms | slowest ms |\n|---|---|---|---|\n");
        for f in starts {
            let (p50, max) = (cell(f.p50_ms, 0), cell(f.max_ms, 0));
            writeln!(text, "| {} | {} | {p50} | {max}{} |", f.contender, f.events, failure(f)).unwrap();
        }
    }
    for (experiment, title, says) in [
        ("outage", "Kafka down", "The broker is stopped in the middle of a drain and comes back."),
        ("growth", "Growth", "The same work with a backlog ten times as long."),
    ] {
        let rows = of(experiment);
        if !rows.is_empty() {
            section(&mut text, title, says, &[]);
            text.push_str("| workload | events | CPU µs/event | peak MB |\n|---|---|---|---|\n");
            for f in rows {
                let (cpu, rss) =
                    (cell(f.cpu_us_per_event, 2), cell(f.rss_peak_bytes.map(|b| b as f64 / 1e6), 1));
                writeln!(text, "| {} | {} | {cpu} | {rss}{} |", f.workload, f.events, failure(f)).unwrap();
            }
        }
    }
    text
}

fn failure(f: &Figure) -> String {
    f.failed.as_ref().map_or_else(String::new, |why| format!(" **failed: {}**", why.replace('|', "/")))
}

/// With the thousands apart; a dash for what there is not.
fn cell(number: Option<f64>, decimals: usize) -> String {
    let Some(number) = number else { return "–".to_owned() };
    let text = format!("{number:.decimals$}");
    let (whole, rest) =
        text.split_once('.').map_or((text.as_str(), String::new()), |(w, r)| (w, format!(".{r}")));
    let mut grouped = String::new();
    for (i, digit) in whole.char_indices() {
        if i > 0
            && digit.is_ascii_digit()
            && whole[..i].ends_with(|c: char| c.is_ascii_digit())
            && (whole.len() - i) % 3 == 0
        {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped + &rest
}

/// Sizes of a chart, in pixels.
const ROW: usize = 20;
const GROUP: usize = 26;
const LEFT: usize = 170;
const WIDTH: usize = 760;

/// Horizontal bars, grouped by transport and workload. `None` when there is nothing to show.
fn chart(figures: &[Figure], name: &str, title: &str, unit: &str, get: Get) -> Option<String> {
    let bars: Vec<(&Figure, f64)> = figures.iter().filter_map(|f| Some((f, get(f)?))).collect();
    let longest = bars.iter().map(|(_, value)| *value).fold(0.0, f64::max);
    if bars.is_empty() || longest <= 0.0 {
        return None;
    }
    let (mut body, mut y, mut group) = (String::new(), 46, String::new());
    for (f, value) in &bars {
        let heading = format!("{}, {}", f.workload, f.transport);
        if heading != group {
            y += GROUP;
            writeln!(body, r#"<text x="8" y="{}" class="group">{heading}</text>"#, y - 7).unwrap();
            group = heading;
        }
        let length = (value.max(0.0) / longest * (WIDTH - LEFT - 90) as f64).max(1.0);
        let colour = match f.contender.as_str() {
            "outbox-tailer" => "#1f6f8b",
            "outbox-tailer-mock" => "#7fb3c4",
            "debezium" => "#c0603a",
            "reference-poller" => "#8a7f5c",
            _ => "#9aa0a6",
        };
        let middle = y + ROW / 2 + 4;
        writeln!(
            body,
            r#"<text x="{}" y="{middle}" text-anchor="end">{}</text><rect x="{LEFT}" y="{}" width="{length:.1}" height="{}" fill="{colour}"/><text x="{:.1}" y="{middle}">{}</text>"#,
            LEFT - 8,
            f.contender,
            y + 2,
            ROW - 4,
            LEFT as f64 + length + 6.0,
            cell(Some(*value), if *value < 100.0 { 2 } else { 0 }),
        )
        .unwrap();
        y += ROW;
    }
    let height = y + 12;
    Some(format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="{name}">
<title id="{name}">{title}, {unit}</title>
<style>text {{ font: 12px sans-serif; fill: #222 }} .group {{ font-weight: bold }} .title {{ font-size: 15px }}</style>
<rect width="{WIDTH}" height="{height}" fill="#fff"/>
<text x="8" y="24" class="title">{title} ({unit})</text>
{body}</svg>
"##
    ))
}
