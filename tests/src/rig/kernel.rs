//! A kernel as its Debian package has it, unpacked: `boot/vmlinuz-RELEASE` and modules.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::error::{Error, Result, Tried};

/// Where `cargo xtask setup` unpacks kernels, each in a folder of its series' name.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/kernels");

/// A kernel unpacked from its package.
#[derive(Clone, Debug)]
pub struct Kernel {
    image: PathBuf,
    release: String,
    /// Module files by name, with underscores, as `lsmod` shows them.
    modules: HashMap<String, PathBuf>,
    built_in: String,
}

/// An uncompressed kernel module.
#[derive(Clone, Debug)]
pub struct Module {
    /// Name of the module, with underscores.
    pub name: String,
    /// Contents of the ELF file.
    pub image: Vec<u8>,
}

impl Kernel {
    /// Finds the kernel of a series, such as 6.1.
    ///
    /// # Errors
    /// None of that series is unpacked here.
    pub fn find(series: &str) -> Result<Self> {
        let folder = Path::new(FOLDER).join(series);
        if !folder.is_dir() {
            return Err(Error::Missing(format!(
                "there is no kernel in {}: `cargo xtask setup` fetches it where there is apt",
                folder.display()
            )));
        }
        let damaged = |what: &str| {
            Error::Missing(format!(
                "{} has no {what}: remove the folder and run `cargo xtask setup`",
                folder.display()
            ))
        };
        let image = entries(&folder.join("boot"))?
            .into_iter()
            .find(|path| name(path).starts_with("vmlinuz-"))
            .ok_or_else(|| damaged("boot/vmlinuz-*"))?;
        let release = name(&image).trim_start_matches("vmlinuz-").to_owned();
        // Newer packages have /lib merged into /usr.
        let tree = ["lib/modules", "usr/lib/modules"]
            .map(|modules| folder.join(modules).join(&release))
            .into_iter()
            .find(|tree| tree.is_dir())
            .ok_or_else(|| damaged("modules"))?;
        let mut modules = HashMap::new();
        list(&tree.join("kernel"), &mut modules)?;
        let built_in = tree.join("modules.builtin");
        Ok(Kernel {
            image,
            release,
            modules,
            built_in: fs::read_to_string(&built_in)
                .tried(format!("read {}", built_in.display()))?,
        })
    }

    /// Path of the bootable image.
    pub fn image(&self) -> &Path {
        &self.image
    }

    /// Release of the kernel, such as `6.1.0-56-cloud-amd64`.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// Returns these modules and their dependencies, each after its dependencies. Built-in ones are
    /// left out.
    ///
    /// # Errors
    /// A name is neither a module nor built in.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<Module>> {
        let mut loaded = Vec::new();
        for name in names {
            self.add(&underscored(name), &mut loaded)?;
        }
        Ok(loaded)
    }

    /// Modules have no cycles: modpost refuses them.
    fn add(&self, name: &str, loaded: &mut Vec<Module>) -> Result<()> {
        if loaded.iter().any(|module| module.name == name) {
            return Ok(());
        }
        let Some(path) = self.modules.get(name) else {
            let built_in = self.built_in.lines().any(|line| module_name(line) == name);
            let lacks = || Error::unexpected(format!("{} has no module {name}", self.release));
            return built_in.then_some(()).ok_or_else(lacks);
        };
        let image = read(path)?;
        for needed in needs(&image) {
            self.add(&underscored(&needed), loaded)?;
        }
        loaded.push(Module {
            name: name.to_owned(),
            image,
        });
        Ok(())
    }
}

/// Returns the modules that a module depends on: the `depends=` of its `.modinfo`, a section of
/// NUL-terminated assignments.
pub(super) fn needs(image: &[u8]) -> Vec<String> {
    const FIELD: &[u8] = b"\0depends=";
    let Some(at) = image.windows(FIELD.len()).position(|bytes| bytes == FIELD) else {
        return Vec::new();
    };
    let value = image[at + FIELD.len()..].split(|byte| *byte == 0).next();
    let value = String::from_utf8_lossy(value.unwrap_or_default());
    let names = value.split(',').filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

/// A module file's contents; Debian compresses them since 6.12.
fn read(path: &Path) -> Result<Vec<u8>> {
    if !name(path).ends_with(".xz") {
        return fs::read(path).tried(format!("read {}", path.display()));
    }
    let output = Command::new("xz")
        .args(["--decompress", "--stdout"])
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .tried(format!("run `xz` on {} (package xz-utils)", path.display()))?;
    match output.status.success() {
        true => Ok(output.stdout),
        false => Err(Error::unexpected(format!(
            "`xz` on {}: {}",
            path.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

fn list(folder: &Path, modules: &mut HashMap<String, PathBuf>) -> Result<()> {
    for path in entries(folder)? {
        if path.is_dir() {
            list(&path, modules)?;
        } else {
            modules.insert(module_name(name(&path)), path);
        }
    }
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let what = || format!("list {}", folder.display());
    let entries = fs::read_dir(folder).tried(what())?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    paths.collect::<Result<_, _>>().tried(what())
}

fn name(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// Name of the module in a file: `kernel/net/sched/cls_bpf.ko.xz` is `cls_bpf`.
fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or_default();
    underscored(file.split('.').next().unwrap_or_default())
}

fn underscored(name: &str) -> String {
    name.replace('-', "_")
}
