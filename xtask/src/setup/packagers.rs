//! cargo's subcommands that make packages and bills of materials. Each is built once, into a folder
//! of ours, and never by `cargo xtask test`.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};

use crate::workspace::{Workspace, run, say};

/// A program on crates.io, of one version.
pub(crate) struct Packager {
    name: &'static str,
    version: &'static str,
    /// Features that are passed to `cargo install`.
    features: &'static [&'static str],
}

/// Makes a `.deb`. Without its features, which are a C library's xz in the place of the program's.
pub(crate) const DEB: Packager = Packager {
    name: "cargo-deb",
    version: "3.8.0",
    features: &["--no-default-features"],
};

/// Builder of `.rpm` packages.
pub(crate) const RPM: Packager = Packager {
    name: "cargo-generate-rpm",
    version: "0.21.1",
    features: &[],
};

/// Lists the crates that a package is made of, as CycloneDX.
pub(crate) const SBOM: Packager = Packager {
    name: "cargo-cyclonedx",
    version: "0.5.9",
    features: &[],
};

/// The program's path; built first where it is not there.
pub(crate) fn find_or_install(workspace: &Workspace, packager: &Packager) -> Result<PathBuf> {
    let Packager {
        name,
        version,
        features,
    } = packager;
    let into = workspace.tools().join(format!("{name}-{version}"));
    let program = into.join("bin").join(name);
    if program.is_file() {
        return Ok(program);
    }
    say(format!("building {name} {version} (some minutes, once)"));
    run(workspace
        .cargo()
        // Without optimisation, which takes longer than it saves: each runs for a second.
        .args(["install", name, "--debug", "--locked", "--quiet", "--force"])
        .args(["--version", version])
        .args(*features)
        .arg("--root")
        .arg(&into)
        .arg("--target-dir")
        .arg(into.join("build"))
        .env("CARGO_PROFILE_DEV_DEBUG", "0"))
    .with_context(|| format!("could not build {name} {version}"))?;
    // Intermediate files, some hundred megabytes: never needed again.
    fs::remove_dir_all(into.join("build")).ok();
    Ok(program)
}
