//! `slipgate serve --config FILE`: flags from a TOML file.
//!
//! A key is the name of a flag without its dashes. A list gives the flag once for each element, and
//! `true` gives a flag that has no value. The file's flags come before those of the command line,
//! so that the latter win. Rules are refused: their order matters, which a policy file keeps.
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use clap::{ArgMatches, Args as _, Command, CommandFactory as _};
use slipgate_policy::document::ConfigError;
use toml::Value;

use crate::args::{ChildArgs, CommandLine, RunArgs};

const SERVE: &str = "serve";
/// Flags whose order among each other matters.
const RULES: [&str; 4] = ["allow", "inspect", "deny", "deny-file"];

/// Parses the command line, with the flags of `--config` where it has one. Exits with clap's
/// message where clap refuses it.
pub(crate) fn matches() -> Result<ArgMatches, ConfigError> {
    if let Some(matches) = of_one_command(&std::env::args_os().collect::<Vec<_>>()) {
        return Ok(matches);
    }
    let matches = CommandLine::command().get_matches();
    let serve = matches.subcommand_matches(SERVE);
    let file = serve.and_then(|serve| serve.get_one::<PathBuf>("config"));
    let Some(file) = file else {
        return Ok(matches);
    };
    let unreadable =
        |problem: String| ConfigError::new("--config", file.display(), problem, "give a TOML file");
    let text =
        std::fs::read_to_string(file).map_err(|e| unreadable(format!("it can't be read ({e})")))?;
    let flags = flags(file, &text)?;
    let typed = std::env::args_os().collect::<Vec<_>>();
    // The subcommand comes first: there are no flags before it.
    let (command, rest) = typed.split_at(2.min(typed.len()));
    let all = command
        .iter()
        .cloned()
        .chain(flags)
        .chain(rest.iter().cloned());
    Ok(CommandLine::command().get_matches_from(all))
}

/// Parses a command line that was made here, without the program's name. Exits with clap's message where
/// clap refuses it.
pub(crate) fn matches_from(arguments: &[OsString]) -> ArgMatches {
    let name = [OsString::from("slipgate")].into_iter();
    CommandLine::command().get_matches_from(name.chain(arguments.iter().cloned()))
}

/// Parses the command line of a process that a machine's start waits for, with the arguments of that
/// command alone: making those of all commands takes clap most of its time. `None`: of another
/// command, or one that clap refuses or answers, with what it knows of all.
fn of_one_command(arguments: &[OsString]) -> Option<ArgMatches> {
    let alone = command_alone(arguments.get(1)?.to_str()?)?;
    let line = Command::new("slipgate").subcommand(alone);
    line.try_get_matches_from(arguments).ok()
}

/// Returns the arguments of a command, if they can be had without those of all others.
pub(super) fn command_alone(name: &str) -> Option<Command> {
    Some(match name {
        "run" => RunArgs::augment_args(Command::new("run")),
        "vmm" => ChildArgs::augment_args(Command::new("vmm")),
        "engine" => ChildArgs::augment_args(Command::new("engine")),
        _ => return None,
    })
}

/// Returns the flags that are equivalent to a file's text.
fn flags(file: &Path, text: &str) -> Result<Vec<OsString>, ConfigError> {
    let error = |problem: String, remedy: &str| {
        ConfigError::new("--config", file.display(), problem, remedy)
    };
    let table: toml::Table = text
        .parse()
        .map_err(|e: toml::de::Error| error(e.message().to_owned(), "correct it"))?;
    let command = CommandLine::command();
    let serve = command.find_subcommand(SERVE).expect("a subcommand");
    let mut flags = Vec::new();
    for (key, value) in &table {
        if !takes(serve, key) {
            return Err(error(
                format!("{key}: `slipgate serve` has no flag --{key}"),
                "give keys that `slipgate serve --help` shows as flags",
            ));
        }
        if RULES.contains(&key.as_str()) {
            return Err(error(
                format!("{key}: rules have an order, which the keys of this file have not"),
                "write them into a policy file, and name that: policy = \"FILE\"",
            ));
        }
        for value in values(value).ok_or_else(|| {
            error(
                format!("{key}: that is no value of a flag"),
                "give a text, a number, true, or a list of texts and numbers",
            )
        })? {
            flags.push(value.map_or_else(
                || format!("--{key}").into(),
                |value| format!("--{key}={value}").into(),
            ));
        }
    }
    Ok(flags)
}

fn takes(serve: &Command, key: &str) -> bool {
    let mut flags = serve.get_arguments().filter_map(|arg| arg.get_long());
    key != "config" && flags.any(|flag| flag == key)
}

/// The values that a flag is given, one for each time that it is given; `None` within: it has none.
fn values(value: &Value) -> Option<Vec<Option<String>>> {
    Some(match value {
        Value::String(text) => vec![Some(text.clone())],
        Value::Integer(number) => vec![Some(number.to_string())],
        Value::Boolean(true) => vec![None],
        Value::Boolean(false) => Vec::new(),
        Value::Array(all) => {
            let mut each = Vec::new();
            for value in all {
                match value {
                    Value::String(_) | Value::Integer(_) => each.extend(values(value)?),
                    _ => return None,
                }
            }
            each
        }
        Value::Float(_) | Value::Datetime(_) | Value::Table(_) => return None,
    })
}

#[cfg(test)]
#[path = "file_test.rs"]
mod tests;
