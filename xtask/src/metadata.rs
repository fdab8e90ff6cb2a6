//! Reads the crates of a workspace from `cargo metadata`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::workspace::{Workspace, capture};

/// A crate of the workspace, with its dependencies.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Directory of its manifest.
    pub(crate) folder: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
    /// Root source files of its library and its binaries.
    pub(crate) roots: Vec<PathBuf>,
}

/// One dependency in a manifest.
#[derive(Debug)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// Kind of the dependency: `dev` or `build`; `None` for a normal one.
    pub(crate) kind: Option<String>,
    /// Path of the dependency, if it is a crate of this repository.
    pub(crate) path: Option<String>,
}

/// Returns the packages of the workspace whose `Cargo.toml` is at `manifest`.
pub(crate) fn packages(workspace: &Workspace, manifest: &Path) -> Result<Vec<Package>> {
    let told = capture(
        workspace
            .cargo()
            .args([
                "metadata",
                "--no-deps",
                "--format-version=1",
                "--manifest-path",
            ])
            .arg(manifest),
    )?;
    parse(&told)
}

/// Parses the JSON of `cargo metadata --no-deps`, which lists workspace members only.
pub(crate) fn parse(told: &str) -> Result<Vec<Package>> {
    let metadata: Option<Value> = serde_json::from_str(told).ok();
    metadata
        .and_then(|metadata| {
            let packages = metadata["packages"].as_array()?.iter();
            packages.map(package).collect()
        })
        .context("`cargo metadata` wrote something unexpected")
}

fn package(told: &Value) -> Option<Package> {
    let dependencies = told["dependencies"].as_array()?.iter();
    let targets = told["targets"].as_array()?.iter();
    Some(Package {
        name: text(&told["name"])?,
        folder: PathBuf::from(told["manifest_path"].as_str()?)
            .parent()?
            .to_owned(),
        dependencies: dependencies.map(dependency).collect::<Option<_>>()?,
        roots: targets
            .filter(|target| is_library_or_binary(target))
            .map(|target| text(&target["src_path"]).map(PathBuf::from))
            .collect::<Option<_>>()?,
    })
}

fn dependency(told: &Value) -> Option<Dependency> {
    Some(Dependency {
        name: text(&told["name"])?,
        kind: text(&told["kind"]),
        path: text(&told["path"]),
    })
}

fn is_library_or_binary(target: &Value) -> bool {
    let kinds = target["kind"].as_array().into_iter().flatten();
    kinds
        .filter_map(Value::as_str)
        .any(|kind| kind == "bin" || kind.ends_with("lib"))
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}
