//! Version of a Rust compiler, from `rustc -vV`.

use anyhow::{Context, Result};

use crate::workspace::{Workspace, capture};

/// Returns the version of the compiler that the workspace is built with.
pub(crate) fn rustc_version(workspace: &Workspace) -> Result<RustcVersion> {
    RustcVersion::parse(&capture(workspace.rustc().arg("-vV"))?)
}

/// Output of `rustc -vV`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RustcVersion {
    /// Release, such as `1.96.0` or `1.97.0-nightly`.
    pub(crate) release: String,
    /// Target triple of the host.
    pub(crate) host: String,
    pub(crate) llvm_major: u32,
}

impl RustcVersion {
    /// Parses the output of `rustc -vV`.
    pub(crate) fn parse(told: &str) -> Result<Self> {
        let field = |name: &str| {
            told.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
                .map(str::trim)
                .with_context(|| format!("`rustc -vV` names no `{name}`, but says: {told}"))
        };
        let llvm = field("LLVM version")?;
        let llvm_major = llvm
            .split('.')
            .next()
            .and_then(|major| major.parse().ok())
            .with_context(|| format!("`rustc -vV` has the LLVM version `{llvm}`"))?;
        Ok(Self {
            release: field("release")?.to_owned(),
            host: field("host")?.to_owned(),
            llvm_major,
        })
    }

    /// Whether it accepts `-Z` flags without `RUSTC_BOOTSTRAP`.
    pub(crate) fn is_nightly(&self) -> bool {
        self.release.ends_with("-nightly") || self.release.ends_with("-dev")
    }
}

#[cfg(test)]
#[path = "rustc_version_test.rs"]
mod tests;
