//! Debian packages that are downloaded and unpacked, but not installed.
//!
//! The package lists of other releases are kept in a directory of their own, so that this machine's
//! sources are left unchanged.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use super::apt;
use crate::workspace::{Scratch, capture, say};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Creates a temporary directory beside the target, so that the result can be renamed into place.
pub(super) fn scratch_in(folder: &Path) -> Result<Scratch> {
    if !apt::is_here() {
        bail!("that takes apt, Debian's package manager");
    }
    Scratch::below(folder)
}

/// Unpacks a package into `target`, which is then complete or absent.
pub(super) fn unpack(package: &Path, scratch: &Path, target: &Path) -> Result<()> {
    let unpacked = scratch.join("unpacked");
    unpack_into(package, &unpacked)?;
    fs::rename(&unpacked, target)?;
    Ok(())
}

/// Unpacks a package into `tree`, beside what is there.
pub(super) fn unpack_into(package: &Path, tree: &Path) -> Result<()> {
    let mut dpkg = Command::new("dpkg-deb");
    capture(dpkg.arg("-x").arg(package).arg(tree)).map(drop)
}

/// Downloads the packages that `which` finds in this machine's lists, and unpacks all of them into one
/// directory, which is returned. Lists may lack one, or be older than what the mirror still has: they are
/// refreshed, once.
pub(super) fn fetch_unpacked(
    scratch: &Path,
    which: impl Fn(&Lists) -> Result<Vec<String>>,
) -> Result<PathBuf> {
    let fetch = |scratch: PathBuf| {
        let lists = Lists::of_this_machine();
        let tree = scratch.join("tree");
        for name in which(&lists)? {
            let into = scratch.join(&name);
            fs::create_dir_all(&into)?;
            let package = lists.download(&name, &into)?;
            unpack_into(&package, &tree)?;
        }
        Ok(tree)
    };
    fetch(scratch.join("known")).or_else(|first: anyhow::Error| {
        apt::update().with_context(|| format!("{first:#}"))?;
        fetch(scratch.join("updated"))
    })
}

/// Package lists to search: options for apt's programs.
pub(super) struct Lists(Vec<String>);

impl Lists {
    /// Those of this machine's own sources.
    pub(super) fn of_this_machine() -> Self {
        Lists(Vec::new())
    }

    /// Downloads the lists of another release, from the archive that this machine uses.
    pub(super) fn of_release(release: &str, scratch: &Path) -> Result<Self> {
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

    /// The names of the packages that a package depends on, without alternatives to them.
    pub(super) fn depends_of(&self, package: &str) -> Result<Vec<String>> {
        let listed = capture(
            self.apt("apt-cache")
                .args(["depends", "--important", package]),
        )?;
        let names = listed.lines().map(str::trim_start);
        let names = names.filter_map(|line| {
            line.strip_prefix("Depends: ")
                .or(line.strip_prefix("PreDepends: "))
        });
        Ok(names.map(str::to_owned).collect())
    }

    /// Downloads a package into `into`, which is empty before.
    pub(super) fn download(&self, package: &str, into: &Path) -> Result<PathBuf> {
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

    /// One of apt's programs, which reads these lists.
    pub(super) fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.arg("--quiet=2").args(&self.0);
        command
    }
}
