//! Kernels for tests: Debian's cloud kernels, downloaded and unpacked into `target/kernels/SERIES`
//! but never installed, a busybox as their userspace, and QEMU to boot them.
//!
//! A Debian release has only some of them. The others are in neighbouring releases of the same
//! archive. Their package lists are kept in a directory of their own, so that this machine's
//! sources are left unchanged.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::{apt, tools};
use crate::workspace::{Scratch, Workspace, capture, say};

/// Kernel series, each with the Debian release that contains it.
const KERNELS: [(&str, &str); 2] = [("6.1", "bookworm"), ("6.12", "trixie")];

/// Package of the only userspace program of a Linux guest; it is statically linked.
const BUSYBOX: &str = "busybox-static";

/// Programs that boot and unpack the kernels, with their packages.
const TOOLS: [tools::Tool; 2] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("xz", "xz-utils"),
];

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

pub(super) fn names() -> impl Iterator<Item = &'static str> {
    KERNELS.iter().map(|(series, _)| *series)
}

pub(super) fn find_or_fetch(workspace: &Workspace) -> Result<()> {
    if !cfg!(target_arch = "x86_64") {
        bail!("the kernels are for x86-64");
    }
    let missing = tools::install(&TOOLS)?;
    if !missing.is_empty() {
        bail!("there is no {}: install it", missing.join(", no "));
    }
    let folder = workspace.kernels();
    for (series, release) in KERNELS {
        if !folder.join(series).is_dir() {
            fetch(&folder, series, release)
                .with_context(|| format!("could not fetch a Linux {series}"))?;
        }
    }
    if !folder.join("busybox").is_dir() {
        fetch_busybox(&folder).context("could not fetch busybox")?;
    }
    Ok(())
}

fn fetch_busybox(folder: &Path) -> Result<()> {
    let scratch = scratch_in(folder)?;
    let package = Lists::of_this_machine().download(BUSYBOX, scratch.path())?;
    unpack(&package, scratch.path(), &folder.join("busybox"))
}

fn fetch(folder: &Path, series: &str, release: &str) -> Result<()> {
    let scratch = scratch_in(folder)?;
    let package = match Lists::of_this_machine().download_kernel(series, scratch.path()) {
        Ok(package) => package,
        Err(why) => {
            say(format!("{why:#}; looking in Debian's {release}"));
            Lists::of_release(release, scratch.path())?.download_kernel(series, scratch.path())?
        }
    };
    unpack(&package, scratch.path(), &folder.join(series))
}

/// Creates a temporary directory beside the target, so that the result can be renamed into place.
fn scratch_in(folder: &Path) -> Result<Scratch> {
    if !apt::is_here() {
        bail!("that takes apt, Debian's package manager");
    }
    Scratch::below(folder)
}

/// Unpacks a package into `target`, which is then complete or absent.
fn unpack(package: &Path, scratch: &Path, target: &Path) -> Result<()> {
    let unpacked = scratch.join("unpacked");
    capture(
        Command::new("dpkg-deb")
            .arg("-x")
            .arg(package)
            .arg(&unpacked),
    )?;
    fs::rename(&unpacked, target)?;
    Ok(())
}

/// Package lists to search: options for apt's programs.
struct Lists(Vec<String>);

impl Lists {
    fn of_this_machine() -> Self {
        Lists(Vec::new())
    }

    /// Downloads the lists of another release, from the archive that this machine uses.
    fn of_release(release: &str, scratch: &Path) -> Result<Self> {
        let archive = capture(Command::new("apt-get").args([
            "indextargets",
            "--format",
            "$(REPO_URI)",
            "Origin: Debian",
            "Created-By: Packages",
        ]))?;
        let archive = archive.lines().next().context(
            "this machine's apt knows no archive of Debian's: see /etc/apt/sources.list.d",
        )?;
        let at = |name: &str| scratch.join(name);
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(at(folder))?;
        }
        let signed = if Path::new(KEYRING).exists() {
            format!("[signed-by={KEYRING}] ")
        } else {
            String::new()
        };
        fs::write(
            at("sources.list"),
            format!("deb {signed}{archive} {release} main\n"),
        )?;
        let option = |name: &str, value: &Path| format!("-o{name}={}", value.display());
        let lists = Lists(vec![
            option("Dir::Etc::SourceList", &at("sources.list")),
            option("Dir::Etc::SourceParts", Path::new("-")),
            option("Dir::State::Lists", &at("lists")),
            option("Dir::Cache", &at("cache")),
        ]);
        capture(lists.apt("apt-get").arg("update"))?;
        Ok(lists)
    }

    /// Downloads the newest kernel of a series into `into`.
    fn download_kernel(&self, series: &str, into: &Path) -> Result<PathBuf> {
        let listed = capture(
            self.apt("apt-cache")
                .args(["pkgnames", &format!("linux-image-{series}.")]),
        )?;
        let package = newest(&listed)
            .with_context(|| format!("there is no cloud kernel {series} in apt's lists"))?;
        self.download(package, into)
    }

    fn download(&self, package: &str, into: &Path) -> Result<PathBuf> {
        say(format!("downloading the Debian package {package}"));
        capture(
            self.apt("apt-get")
                .args(["download", package])
                .current_dir(into),
        )?;
        let files = fs::read_dir(into)?.collect::<Result<Vec<_>, _>>()?;
        files
            .into_iter()
            .map(|file| file.path())
            .find(|file| file.extension().is_some_and(|extension| extension == "deb"))
            .with_context(|| format!("apt-get left no {package} in {}", into.display()))
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("--quiet=2").args(&self.0);
        command
    }
}

/// Returns the cloud kernel package with the highest version in its name. Unsigned duplicates are
/// skipped.
fn newest(packages: &str) -> Option<&str> {
    let numbers = |package: &&str| -> Vec<u64> {
        package
            .split(|character: char| !character.is_ascii_digit())
            .filter_map(|digits| digits.parse().ok())
            .collect()
    };
    packages
        .lines()
        .filter(|package| package.ends_with("-cloud-amd64"))
        .max_by_key(numbers)
}

#[cfg(test)]
#[path = "kernels_test.rs"]
mod tests;
