//! `slipgate policy apply`: another policy, without ending the flows that it permits.
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use slipgate_ipc::client::{ClientAnswer, ClientRequest, ask};

use crate::{
    args::ApplyArgs,
    brokers::{ANOTHER_ANSWER, NOBODY, sockets},
    show::{print_once, table::counted},
};

/// Asks the broker to read its policy file again, or another file.
pub(crate) fn run(args: &ApplyArgs) -> anyhow::Result<()> {
    let socket = socket(args)?;
    let file = args.file.as_deref().map(absolute).transpose()?;
    match ask(&socket, ClientRequest::Apply { file })? {
        ClientAnswer::Applied { cut, kept, left } => {
            let mut text = format!("in force: {} cut, {kept} go on", counted(cut, "flow"));
            if left > 0 {
                text.push_str(&format!(
                    ", {left} of them against it (on_reload = \"keep\")"
                ));
            }
            print_once(&format!("{text}\n"))
        }
        ClientAnswer::Error { error, .. } => bail!("nothing has changed: {error}"),
        _ => bail!(ANOTHER_ANSWER),
    }
}

/// The broker reads it, now and on SIGHUP: from its own directory the name would mean another file.
/// Links stay what they are, to lead elsewhere tomorrow.
fn absolute(file: &Path) -> anyhow::Result<PathBuf> {
    let what = || format!("{}", file.display());
    file.metadata().with_context(what)?;
    std::path::absolute(file).with_context(what)
}

/// The process that serves the VM, or the only one.
fn socket(args: &ApplyArgs) -> anyhow::Result<PathBuf> {
    let mut served: Vec<(PathBuf, Vec<String>)> = Vec::new();
    for socket in sockets(&args.pin_dir)? {
        match ask(&socket, ClientRequest::Vms) {
            Ok(ClientAnswer::UnknownVm { served: vms }) => served.push((socket, vms)),
            Ok(ClientAnswer::Error { error, .. }) => bail!("{error}"),
            Ok(_) => bail!(ANOTHER_ANSWER),
            // One that was killed has left it.
            Err(e) if e.is_nobodys() => {}
            Err(e) => return Err(e.into()),
        }
    }
    let all = || {
        let names = served.iter().map(|(_, vms)| vms.join(", "));
        names.collect::<Vec<_>>().join("; ")
    };
    match (&args.vm, &served[..]) {
        (_, []) => bail!(NOBODY),
        (None, [(only, _)]) => Ok(only.clone()),
        (None, some) => bail!(
            "{} processes serve VMs here ({}): give --vm NAME for the one that is meant; each has \
             its own policy",
            some.len(),
            all()
        ),
        (Some(vm), some) => match some.iter().find(|(_, vms)| vms.contains(vm)) {
            Some((socket, _)) => Ok(socket.clone()),
            None => bail!("no VM {vm:?} is served; there is {}", all()),
        },
    }
}

#[cfg(test)]
#[path = "apply_test.rs"]
mod tests;
