//! Packages, bills of materials and digests.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    setup::{self, packagers},
    workspace::{Workspace, capture, run},
};

/// Crates inside the binary: the folder of the manifest, and the name of the bill of materials. The
/// BPF programs and the guest are built apart and embedded.
const EMBEDDED: [(&str, &str); 3] = [
    ("cli", "slipgate"),
    ("ebpf/programs", "slipgate-programs"),
    ("guest", "slipgate-guest"),
];

/// Makes the packages for a target in `folder`, of its binary and of what was staged for all.
pub(super) fn build(
    workspace: &Workspace,
    target: &str,
    binary: &Path,
    folder: &Path,
) -> Result<()> {
    super::copy(binary, &workspace.package().join("slipgate"))?;
    let deb = setup::packager(workspace, &packagers::DEB)?;
    run(Command::new(deb)
        .current_dir(&workspace.root)
        .args(["--no-build", "--no-strip", "--quiet", "--package=slipgate"])
        .args(["--target", target])
        .arg("--output")
        .arg(folder))?;
    let rpm = setup::packager(workspace, &packagers::RPM)?;
    run(Command::new(rpm)
        .current_dir(&workspace.root)
        .args(["--package", "cli", "--target", target])
        // It is static.
        .args(["--auto-req", "disabled"])
        .arg("--output")
        .arg(folder))
}

/// Makes the bills of materials of all that is embedded.
pub(super) fn bills(workspace: &Workspace, folder: &Path) -> Result<()> {
    let sbom = setup::packager(workspace, &packagers::SBOM)?;
    for (package, name) in EMBEDDED {
        bill(workspace, &sbom, package, name, folder)?;
    }
    Ok(())
}

/// Makes the bill of materials of a package. The program writes one beside each manifest of the
/// workspace: the one that is wanted is moved, the others are removed.
fn bill(
    workspace: &Workspace,
    sbom: &Path,
    package: &str,
    name: &str,
    folder: &Path,
) -> Result<()> {
    const FILE: &str = "slipgate-dist-bill";
    let manifest = workspace.root.join(package).join("Cargo.toml");
    run(Command::new(sbom)
        .current_dir(&workspace.root)
        .args(["cyclonedx", "--quiet", "--format=json", "--no-build-deps"])
        .args(["--spec-version=1.5", "--override-filename", FILE])
        .arg("--manifest-path")
        .arg(&manifest))?;
    let file = format!("{FILE}.json");
    let made = workspace.root.join(package).join(&file);
    let to = folder.join(format!("{name}.cdx.json"));
    fs::copy(&made, &to)
        .with_context(|| format!("could not take {} to {}", made.display(), to.display()))?;
    let listed = capture(
        Command::new("git")
            .current_dir(&workspace.root)
            .args(["ls-files", "--others", "--exclude-standard", "--"])
            .arg(format!("*{file}")),
    )?;
    for left in listed.lines() {
        fs::remove_file(workspace.root.join(left)).ok();
    }
    Ok(())
}

/// Writes `SHA256SUMS`, as `sha256sum --check` reads it, and returns the files' names and sizes.
pub(super) fn sum(folder: &Path) -> Result<Vec<String>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("could not read {}", folder.display()))?;
    let mut files = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().into_string();
        let Ok(name) = name else {
            bail!("{} is no name for a release", entry.path().display());
        };
        files.push((name, entry.metadata()?.len()));
    }
    files.sort();
    let names = files.iter().map(|(name, _)| name);
    let sums = capture(Command::new("sha256sum").current_dir(folder).args(names))?;
    let list = folder.join("SHA256SUMS");
    fs::write(&list, sums).with_context(|| format!("could not write {}", list.display()))?;
    let said = |(name, bytes): &(String, u64)| {
        format!("{} ({} KiB)", folder.join(name).display(), bytes / 1024)
    };
    Ok(files.iter().map(said).collect())
}

#[cfg(test)]
#[path = "packages_test.rs"]
mod tests;
