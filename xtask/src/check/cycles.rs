//! Checks that no crate has a cycle of modules.
//!
//! The modules are the top-level ones: a file or folder directly below a crate's root. Such a
//! module depends on another when any of its code outside tests names an item of it. The crate's
//! root does not count as a module: it only declares and re-exports.

mod references;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::{metadata, workspace::Workspace};

/// Manifests of the repository's workspaces.
const MANIFESTS: [&str; 3] = ["Cargo.toml", "ebpf/programs/Cargo.toml", "fuzz/Cargo.toml"];

/// Checks the crates of all workspaces.
///
/// # Errors
/// A crate has a cycle; the error lists all cycles.
pub(super) fn check(workspace: &Workspace) -> Result<()> {
    let mut report = String::new();
    for manifest in MANIFESTS {
        for package in metadata::packages(workspace, &workspace.root.join(manifest))? {
            for root in &package.roots {
                let read = |path: &Path| {
                    fs::read_to_string(path)
                        .with_context(|| format!("could not read {}", path.display()))
                };
                let graph = references::graph(root, &read)?;
                for cycle in cycles(&graph) {
                    describe(&mut report, &package.name, &workspace.root, &cycle, &graph);
                }
            }
        }
    }
    if !report.is_empty() {
        bail!("modules depend on each other in a circle:\n{report}");
    }
    Ok(())
}

/// Edges of the module graph: (dependent, dependency), each with the places in the source.
type Graph = BTreeMap<(String, String), Vec<Place>>;

/// A line of a source file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    file: PathBuf,
    line: usize,
}

/// Returns cycles that together contain every edge of any cycle, the shortest first. Each begins
/// with its alphabetically first module, which is not repeated at the end.
fn cycles(graph: &Graph) -> Vec<Vec<String>> {
    let mut found = BTreeSet::new();
    for (from, to) in graph.keys() {
        if let Some(mut cycle) = shortest_path(graph, to, from) {
            let first = (0..cycle.len()).min_by_key(|at| &cycle[*at]);
            cycle.rotate_left(first.unwrap_or_default());
            found.insert((cycle.len(), cycle));
        }
    }
    found.into_iter().map(|(_, cycle)| cycle).collect()
}

/// Returns the modules on the shortest path from `from` to `to`, both included; `None` if there is
/// none.
fn shortest_path(graph: &Graph, from: &str, to: &str) -> Option<Vec<String>> {
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = VecDeque::from([from]);
    while let Some(at) = queue.pop_front() {
        if at == to {
            let mut path = vec![at];
            while *path.last()? != from {
                path.push(came_from[path.last()?]);
            }
            return Some(path.into_iter().rev().map(str::to_owned).collect());
        }
        for (_, next) in graph.keys().filter(|(source, _)| source == at) {
            if next != from && !came_from.contains_key(next.as_str()) {
                came_from.insert(next, at);
                queue.push_back(next);
            }
        }
    }
    None
}

/// Appends a line for the cycle, and one for each of its edges.
fn describe(report: &mut String, package: &str, root: &Path, cycle: &[String], graph: &Graph) {
    let chain: Vec<&str> = cycle.iter().map(String::as_str).collect();
    let _ = writeln!(report, "  {package}: {} → {}", chain.join(" → "), chain[0]);
    for (from, to) in chain.iter().zip(chain.iter().cycle().skip(1)) {
        let places = &graph[&((*from).to_owned(), (*to).to_owned())];
        let Place { file, line } = &places[0];
        let file = file.strip_prefix(root).unwrap_or(file).display();
        let _ = write!(report, "    {from} → {to}: {file}:{line}");
        let _ = match places.len() - 1 {
            0 => writeln!(report),
            more => writeln!(report, " and {more} more"),
        };
    }
}

#[cfg(test)]
#[path = "cycles_test.rs"]
mod tests;
