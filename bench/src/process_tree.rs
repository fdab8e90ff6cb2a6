//! The processes that a process has started, which may be in other namespaces than it.

use std::fs;

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
