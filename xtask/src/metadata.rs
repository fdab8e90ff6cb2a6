//! What `cargo metadata` says about the crates of a workspace.

use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::workspace::{Workspace, capture};

/// A crate of the workspace and what its manifest asks for.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) dependencies: Vec<Dependency>,
}

/// One line of a manifest's dependencies.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `None` for an ordinary one, else `dev` or `build`.
    pub(crate) kind: Option<String>,
    /// Set when it is a crate of this repository.
    pub(crate) path: Option<String>,
}

/// The packages of the workspace whose `Cargo.toml` is at `manifest`.
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

/// Reads the JSON of `cargo metadata --no-deps`, which lists the members only.
pub(crate) fn parse(told: &str) -> Result<Vec<Package>> {
    #[derive(Deserialize)]
    struct Metadata {
        packages: Vec<Package>,
    }
    let metadata: Metadata =
        serde_json::from_str(told).context("`cargo metadata` wrote something unexpected")?;
    Ok(metadata.packages)
}
