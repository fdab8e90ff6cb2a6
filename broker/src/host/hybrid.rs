//! Whether the hybrid NAT can run here.
use std::fs;

use slipgate_control::{object, probe};

/// Capabilities that the broker needs, <linux/capability.h>.
const NEEDED: [(u32, &str); 3] = [(12, "CAP_NET_ADMIN"), (38, "CAP_PERFMON"), (39, "CAP_BPF")];

/// Capabilities for the hybrid NAT that this process has, and those that it lacks.
pub fn capabilities() -> (Vec<&'static str>, Vec<&'static str>) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    of_status(&status)
}

fn of_status(status: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    let (has, lacks): (Vec<_>, Vec<_>) = NEEDED
        .iter()
        .partition(|(number, _)| effective >> number & 1 == 1);
    let names = |list: Vec<(u32, &'static str)>| list.into_iter().map(|(_, name)| name).collect();
    (names(has), names(lacks))
}

/// Returns the reason why the hybrid NAT cannot run here, in a few words; `None` if none is known.
pub fn problem() -> Option<String> {
    let (_, lacks) = capabilities();
    if !lacks.is_empty() {
        return Some(format!("without {}", lacks.join(", ")));
    }
    if let Err(e) = object::bytes(false) {
        return Some(e.to_string());
    }
    problem_of(&probe::checks())
}

fn problem_of(checks: &[probe::Check]) -> Option<String> {
    // The file system is mounted at the start if it is not.
    let is_missing =
        |check: &&probe::Check| !check.ok && !check.optional && check.name != probe::FILE_SYSTEM;
    let missing = checks.iter().find(is_missing);
    missing.map(|check| format!("{}: {}", check.name, check.found))
}

#[cfg(test)]
#[path = "hybrid_test.rs"]
mod tests;
