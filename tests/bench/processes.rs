//! What a process has used, from /proc: read from outside, and the same for every contender.

use std::fs;

/// `USER_HZ`: the unit of times in /proc, whatever the kernel's own tick.
const TICKS_PER_S: f64 = 100.0;

#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// User and system time of all threads.
    pub cpu_s: f64,
    /// Of children that have ended.
    pub children_cpu_s: f64,
}

/// `None` once the process has been reaped; a zombie still has its times.
pub fn usage(pid: i32) -> Option<Usage> {
    let fields = stat(pid)?;
    let time = |at: usize| fields.get(at)?.parse::<f64>().ok();
    // Counted from the state, which is field 3 of proc(5).
    let sum = |a: usize, b: usize| Some((time(a - 3)? + time(b - 3)?) / TICKS_PER_S);
    Some(Usage { cpu_s: sum(14, 15)?, children_cpu_s: sum(16, 17)? })
}

/// Has it ended, though nobody may have asked for its exit status yet?
pub fn has_ended(pid: i32) -> bool {
    stat(pid).is_none_or(|fields| fields.first().is_some_and(|state| state == "Z"))
}

/// Peak resident size; `None` once the process has ended.
pub fn rss_peak_bytes(pid: i32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? * 1024)
}

/// The fields after the name, which may hold anything.
fn stat(pid: i32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(text.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

/// What the tables are to say about the machine.
pub fn machine() -> String {
    let cpus = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(": "));
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!(
        "{} × {}, {} GB, Linux {}",
        cpus.lines().filter(|l| l.starts_with("processor")).count(),
        model.map_or("unknown processor", |(_, name)| name.trim()),
        memory / 1_000_000,
        kernel.trim()
    )
}
