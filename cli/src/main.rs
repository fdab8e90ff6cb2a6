//! The binary `slipgate`: checks the command line and runs one of the roles: the broker
//! (privileged, never sees a packet; a library of its own), the engine (sees packets, has no
//! privileges), the VMM (runs a guest, has no privileges), or a reader of their pinned maps.
mod args;
mod brokers;
mod cni;
mod config;
mod control;
mod doctor;
mod events;
mod log;
mod machines;
mod manual;
mod passt;
mod policy;
mod role;
mod sandbox;
mod show;
mod top;
mod vm;

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context as _, bail};
use clap::{ArgMatches, FromArgMatches as _};
use slipgate_broker::{Daemon, config::RunConfig, host::hybrid};
use slipgate_policy::document::{ConfigError, RuleFlag};

use crate::{
    args::{Command, CommandLine, Mode, RunArgs},
    config::rule_flags,
};

/// Error of `slipgate run` on other machines.
const NO_VMM: &str = "`slipgate run` needs x86-64: its VMM emulates no other machine. Boot the guest by \
                      another VMM, and give its TAP to `slipgate attach` or `slipgate vm add`";

fn main() -> ExitCode {
    if cni::is_asked() {
        return cni::run();
    }
    let asked = passt::arguments().map(|arguments| passt::run(&arguments));
    let matches = match asked.transpose() {
        Ok(None) => config::matches().map_err(Into::into),
        Ok(Some(passt::Asked::GoOn(flags))) => Ok(config::matches_from(&flags)),
        Ok(Some(passt::Asked::Done(code))) => return code,
        Err(e) => Err(e),
    };
    let matches = match matches {
        Ok(matches) => matches,
        Err(e) => {
            log::say(format_args!("{e:#}"));
            return ExitCode::from(slipgate_broker::exit_status(&e));
        }
    };
    let command_line = match CommandLine::from_arg_matches(&matches) {
        Ok(command_line) => command_line,
        Err(e) => e.exit(),
    };
    match run(&command_line, &matches) {
        Ok(code) => code,
        Err(e) => {
            log::say(format_args!("{e:#}"));
            ExitCode::from(slipgate_broker::exit_status(&e))
        }
    }
}

fn run(command_line: &CommandLine, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let done = |()| ExitCode::SUCCESS;
    match &command_line.command {
        Command::Attach(args) if args.has_link() => {
            let config = config::attach_socket(args, rules_of("attach", matches))?;
            log::to_stderr(&args.nat.log)?;
            slipgate_broker::attach_socket(config, &args.nat.log).map(done)
        }
        Command::Attach(args) => {
            if let (false, Some(daemon)) = (args.own, brokers::daemon(&args.nat.pin_dir)?)
                && let Some(given) = matches.subcommand_matches("attach")
            {
                let vms = config::joined::attach(args, given)?;
                log::to_stderr(&args.nat.log)?;
                let uplink = args.nat.uplink.clone();
                return slipgate_broker::attach_to_daemon(&daemon, vms, uplink).map(done);
            }
            let config = config::attach(args, rules_of("attach", matches))?;
            log::to_stderr(&args.nat.log)?;
            slipgate_broker::run(config, &args.nat.log).map(done)
        }
        Command::Run(_) if !cfg!(target_arch = "x86_64") => bail!(NO_VMM),
        Command::Run(args) => run_vm(args, matches),
        Command::Exec(args) => {
            let config = config::exec(args, rules_of("exec", matches))?;
            log::to_stderr(&args.nat.log)?;
            slipgate_broker::exec(config, &args.nat.log)
        }
        Command::Inside(args) => match slipgate_broker::run_inside(&config::inside(args))? {},
        Command::Serve(args) => {
            let config = config::serve(args, rules_of("serve", matches))?;
            log::to_stderr(&args.nat.log)?;
            slipgate_broker::run(config, &args.nat.log).map(done)
        }
        Command::Vm(command) => vm::run(command).map(done),
        Command::Show(command) => show::run(command),
        Command::Events(args) => events::run(args).map(done),
        Command::Top(args) => top::run(args).map(done),
        Command::Control(command) => control::run(command).map(done),
        Command::Policy(args) => policy::run(args),
        Command::Cni => Ok(cni::run()),
        Command::Doctor(args) => doctor::run(args),
        Command::Engine(args) => role::engine::run(args).map(done),
        #[cfg(not(target_arch = "x86_64"))]
        Command::Vmm(_) => bail!(NO_VMM),
        #[cfg(target_arch = "x86_64")]
        Command::Vmm(args) => role::vmm::run(args).map(done),
        Command::Metrics(args) => role::metrics::run(args).map(done),
        Command::Api(args) => role::api::run(args).map(done),
        Command::Manual { dir } => manual::write(dir).map(done),
    }
}

/// Runs a VM, in the mode that was asked for or the one that can be had.
fn run_vm(args: &RunArgs, matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    let order = rules_of("run", matches);
    let figures = show::stats::of_vm;
    let mut config = config::run(args, args.nat.mode == Mode::Userspace, order.clone())?;
    log::to_stderr(&args.nat.log)?;
    if args.nat.mode != Mode::Userspace {
        let daemon = match (args.own, matches.subcommand_matches("run")) {
            (false, Some(given)) => match brokers::daemon(&args.nat.pin_dir)? {
                Some(socket) if args.as_vm.is_some() => {
                    Some(kept_vm(args, given, &mut config, socket)?)
                }
                Some(socket) => Some(config::joined::run(args, given, &config, socket)?),
                None => match &args.as_vm {
                    Some(name) => return Err(no_daemon_for(name).into()),
                    None => None,
                },
            },
            _ => None,
        };
        let problem = match (&daemon, args.nat.mode) {
            (None, Mode::Auto) => hybrid::problem(),
            _ => None,
        };
        let Some(why) = problem else {
            config::refuse_api(&args.api)?;
            return slipgate_broker::run_vm(config, daemon, &args.nat.log, figures);
        };
        let why = format!("--mode auto: the hybrid NAT can't run here ({why})");
        config = config::run(args, true, order)
            .with_context(|| format!("{why}, and user mode can't take its place"))?;
        tracing::warn!("{why}: going on in user mode, in which each packet passes the engine");
    }
    slipgate_broker::run_userspace_vm(config, &args.nat.log, figures)
}

/// The VM of `run --as`, as the daemon behind `socket` has it.
fn kept_vm(
    args: &RunArgs,
    given: &ArgMatches,
    config: &mut RunConfig,
    socket: PathBuf,
) -> anyhow::Result<Daemon> {
    let name = config.nat.vms[0].name.clone();
    // One that does not answer is found by its TAP.
    if let Ok(Some(machine)) = machines::find(&name)
        && machine.is_here()
        && machine.status.name == name
    {
        let pid = machine.status.pid;
        let problem = format!("its machine runs, with the process id {pid}");
        let remedy = "end it first (`slipgate kill`, or `slipgate snapshot --sleep`)";
        return Err(ConfigError::new("--as", &name, problem, remedy).into());
    }
    let (served, _) = vm::vms(&args.nat.pin_dir)?;
    let served = served.into_iter().map(|vm| vm.definition).collect();
    Ok(config::joined::run_as(args, given, config, socket, served)?)
}

fn no_daemon_for(name: &str) -> ConfigError {
    let problem = "no daemon serves this network namespace";
    let remedy = "start `slipgate serve`, which keeps VMs, or leave it out";
    ConfigError::new("--as", name, problem, remedy)
}

fn rules_of(command: &str, matches: &ArgMatches) -> Vec<RuleFlag> {
    let matches = matches.subcommand_matches(command);
    matches.map(rule_flags).unwrap_or_default()
}
