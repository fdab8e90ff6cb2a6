//! The test binaries of crates: compiled by one cargo call, and started as `cargo test` starts them.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::{
    metadata, privilege,
    workspace::{Workspace, is_told_to_xtask},
};

/// The tests of a library or a binary, or a file of integration tests.
#[derive(Debug, PartialEq)]
pub(crate) struct Binary {
    /// Name of its crate.
    pub(crate) package: String,
    /// Directory of the crate's manifest.
    folder: PathBuf,
    /// The source file of its root, relative to that directory.
    source: PathBuf,
    is_integration_test: bool,
    path: PathBuf,
}

/// Compiles the tests of these crates, in one call of cargo.
///
/// # Errors
/// One can't be compiled.
pub(crate) fn build(workspace: &Workspace, packages: &[&str]) -> Result<Vec<Binary>> {
    let members = metadata::packages(workspace, &workspace.root.join("Cargo.toml"))?;
    let output = workspace
        .cargo()
        .args([
            "test",
            "--no-run",
            "--message-format=json-render-diagnostics",
        ])
        .args(selection(packages))
        // Progress and errors.
        .stderr(Stdio::inherit())
        .output()
        .context("could not start cargo")?;
    if !output.status.success() {
        bail!("the tests could not be compiled");
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(parse(&messages, &members))
}

/// Arguments of cargo that select these crates.
pub(crate) fn selection(packages: &[&str]) -> impl Iterator<Item = String> {
    packages.iter().map(|name| format!("--package={name}"))
}

/// Parses cargo's messages, a line of JSON each.
fn parse(messages: &str, members: &[metadata::Package]) -> Vec<Binary> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let mut binaries: Vec<_> = messages
        .filter_map(|message| binary(&message, members))
        .collect();
    // Cargo names them as they are finished. Unit tests first, as `cargo test` has it.
    binaries.sort_by(|a, b| {
        let of = |binary: &Binary| (binary.is_integration_test, binary.source.clone());
        of(a).cmp(&of(b))
    });
    binaries
}

fn binary(message: &Value, members: &[metadata::Package]) -> Option<Binary> {
    let is_test = message["reason"] == "compiler-artifact" && message["profile"]["test"] == true;
    let path = is_test.then(|| message["executable"].as_str())??;
    let folder = Path::new(message["manifest_path"].as_str()?).parent()?;
    let package = members.iter().find(|package| package.folder == folder)?;
    let source = Path::new(message["target"]["src_path"].as_str()?);
    let kinds = message["target"]["kind"].as_array()?;
    Some(Binary {
        package: package.name.clone(),
        folder: folder.to_owned(),
        source: source.strip_prefix(folder).unwrap_or(source).to_owned(),
        is_integration_test: kinds.iter().any(|kind| kind == "test"),
        path: path.into(),
    })
}

impl Binary {
    /// Returns the path of the binary of a crate's source file among these.
    pub(crate) fn path_of<'b>(all: &'b [Self], package: &str, source: &str) -> Option<&'b Path> {
        let is_it = |it: &&Self| it.package == package && it.source == Path::new(source);
        all.iter().find(is_it).map(|binary| &*binary.path)
    }

    /// The line by which `cargo test` announces it.
    pub(crate) fn title(&self) -> String {
        let kind = if self.is_integration_test {
            ""
        } else {
            "unittests "
        };
        let (source, path) = (self.source.display(), self.path.display());
        format!("     Running {kind}{source} ({path})")
    }

    /// A command that runs it as root, in the directory and the environment that cargo gives it.
    ///
    /// # Errors
    /// This process is not root, and there is no sudo.
    pub(crate) fn command(&self) -> Result<Command> {
        let mut command = privilege::as_root_with_environment(&self.path)?;
        for (name, _) in env::vars_os() {
            if is_told_to_xtask(&name) {
                command.env_remove(name);
            }
        }
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder);
        Ok(command)
    }
}

#[cfg(test)]
#[path = "test_binaries_test.rs"]
mod tests;
