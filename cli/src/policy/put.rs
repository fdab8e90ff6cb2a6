//! `slipgate policy put` and `rm`: named policies for the daemon's VMs.
use anyhow::{Context as _, bail};
use slipgate_broker::counted;
use slipgate_ipc::client::{ClientAnswer, ClientRequest, Replaces};

use crate::{
    args::{PutArgs, RemovePolicyArgs},
    brokers::{ANOTHER_ANSWER, ask_daemon},
};

/// Sends the file's text, and waits until the policy is in force.
pub(crate) fn run(args: &PutArgs) -> anyhow::Result<()> {
    let what = || format!("reading {}", args.file.display());
    let request = ClientRequest::PutPolicy {
        name: args.name.clone(),
        text: std::fs::read_to_string(&args.file).with_context(what)?,
        replaces: Replaces::Anything,
    };
    let ClientAnswer::PolicyPut {
        generation,
        cut,
        kept,
        ..
    } = ask_daemon(&args.pin_dir, request)?
    else {
        bail!(ANOTHER_ANSWER);
    };
    let cut = counted(cut, "flow");
    let name = &args.name;
    println!("{name} is in force, generation {generation}: {cut} cut, {kept} go on");
    Ok(())
}

/// Takes the policy back, and waits until it is not in force any more.
pub(crate) fn remove(args: &RemovePolicyArgs) -> anyhow::Result<()> {
    let name = &args.name;
    let request = ClientRequest::RemovePolicy {
        name: name.clone(),
        replaces: Replaces::Anything,
    };
    let ClientAnswer::Done = ask_daemon(&args.pin_dir, request)? else {
        bail!(ANOTHER_ANSWER);
    };
    println!("{name} removed");
    Ok(())
}
