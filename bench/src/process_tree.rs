//! The processes that a process has started, which may be in other namespaces than it.

use std::{fs, time::Duration};

use slipgate_testbed::cpu_time;

/// Most readings of a tree in which processes begin and end.
const READINGS: usize = 20;

/// Returns the descendants of a process that run now.
pub(crate) fn descendants(of: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{of}/task"));
    let children = tasks.into_iter().flatten().flatten().flat_map(|task| {
        // Each thread has the children that it has started itself.
        let text = fs::read_to_string(task.path().join("children")).unwrap_or_default();
        let children = text.split_whitespace().filter_map(|pid| pid.parse().ok());
        children.collect::<Vec<u32>>()
    });
    children
        .flat_map(|child| [vec![child], descendants(child)].concat())
        .collect()
}

/// Returns the CPU time of a process and of all that it has started, those that have ended included once
/// they are waited for: these in ticks of 10 ms.
pub(crate) fn cpu_time(of: u32) -> Duration {
    let mut time = Duration::ZERO;
    for _ in 0..READINGS {
        let processes = [vec![of], descendants(of)].concat();
        let each = processes.iter().map(|process| {
            cpu_time::of_threads(*process, |_| true) + cpu_time::of_waited_children(*process)
        });
        time = each.sum();
        // One that ended meanwhile may be in none of the figures, or in two.
        if processes[1..] == descendants(of) {
            break;
        }
    }
    time
}

#[cfg(test)]
#[path = "process_tree_test.rs"]
mod tests;
