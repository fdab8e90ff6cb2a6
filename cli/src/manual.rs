//! `slipgate manual DIR`: man pages and shell completions, made from the commands as clap has them,
//! so that they can't differ from `--help`. Packages carry them.
use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;

use crate::args::CommandLine;

const SHELLS: [Shell; 3] = [Shell::Bash, Shell::Zsh, Shell::Fish];

/// Writes `man/slipgate*.1` and `completions/` below the folder.
pub(crate) fn write(dir: &Path) -> anyhow::Result<()> {
    let make = |name: &str| {
        let folder = dir.join(name);
        let made = fs::create_dir_all(&folder);
        made.with_context(|| format!("making the folder {}", folder.display()))?;
        anyhow::Ok(folder)
    };
    let written = |folder: &PathBuf, e: io::Error| {
        anyhow::Error::new(e).context(format!("writing to {}", folder.display()))
    };
    let folder = make("man")?;
    clap_mangen::generate_to(shown(), &folder).map_err(|e| written(&folder, e))?;
    let folder = make("completions")?;
    for shell in SHELLS {
        let mut command = shown();
        let name = command.get_name().to_owned();
        clap_complete::generate_to(shell, &mut command, name, &folder)
            .map_err(|e| written(&folder, e))?;
    }
    Ok(())
}

/// The command line without the commands that `--help` does not show. clap's generators of
/// completions would offer those too.
fn shown() -> Command {
    let all = CommandLine::command();
    let subcommands = all.get_subcommands().filter(|c| !c.is_hide_set()).cloned();
    let shown = Command::new("slipgate")
        .subcommands(subcommands.collect::<Vec<_>>())
        .disable_help_subcommand(true);
    let shown = match all.get_about() {
        Some(about) => shown.about(about.clone()),
        None => shown,
    };
    let shown = match all.get_long_about() {
        Some(about) => shown.long_about(about.clone()),
        None => shown,
    };
    shown.version(env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
#[path = "manual_test.rs"]
mod tests;
