//! The routes: one table, of which the router and the OpenAPI document are made.
use hyper::{Method, StatusCode};

use crate::problem::Problem;

/// Action of a route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    Health,
    OpenApi,
    ListVms,
    GetVm,
    PutVm,
    PatchVm,
    RemoveVm,
    KeepVm,
    Freeze,
    Sleep,
    Resume,
    Thaw,
    CutVm,
    EndGeneration,
    Why,
    Flows,
    CutFlow,
    ListPolicies,
    GetPolicy,
    PutPolicy,
    RemovePolicy,
    Stats,
    Metrics,
    Events,
    CaptureVm,
    CaptureFlow,
    ListMachines,
    GetMachine,
    PauseMachine,
    ResumeMachine,
    BalloonMachine,
    SnapshotMachine,
    KillMachine,
}

/// A method on a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Route {
    pub(crate) method: &'static str,
    /// Path with at most one parameter, in braces.
    pub(crate) path: &'static str,
    pub(crate) action: Action,
    pub(crate) summary: &'static str,
    /// Whether it changes anything.
    pub(crate) changes: bool,
}

const fn read(path: &'static str, action: Action, summary: &'static str) -> Route {
    let (method, changes) = ("GET", false);
    Route {
        method,
        path,
        action,
        summary,
        changes,
    }
}

const fn change(
    method: &'static str,
    path: &'static str,
    action: Action,
    summary: &'static str,
) -> Route {
    Route {
        method,
        path,
        action,
        summary,
        changes: true,
    }
}

/// Every route of the API, in the order of the OpenAPI document.
pub(crate) const ROUTES: &[Route] = &[
    read(
        "/v1/health",
        Action::Health,
        "Whether the daemon answers, and how many VMs it serves",
    ),
    read("/v1/openapi.json", Action::OpenApi, "This description"),
    read(
        "/v1/vms",
        Action::ListVms,
        "All VMs with their states, by name",
    ),
    read("/v1/vms/{name}", Action::GetVm, "A VM with its state"),
    change(
        "PUT",
        "/v1/vms/{name}",
        Action::PutVm,
        "Add a VM, or give it this definition; answered when it is in force",
    ),
    change(
        "PATCH",
        "/v1/vms/{name}",
        Action::PatchVm,
        "Change the given parts of a VM's definition",
    ),
    change(
        "DELETE",
        "/v1/vms/{name}",
        Action::RemoveVm,
        "End a VM's flows and serve it no more",
    ),
    change(
        "POST",
        "/v1/vms/{name}/keep",
        Action::KeepVm,
        "Keep a VM whatever becomes of the command that brought it, such as a machine that is to end",
    ),
    change(
        "POST",
        "/v1/vms/{name}/freeze",
        Action::Freeze,
        "Drop everything from and to a VM from now on",
    ),
    change(
        "POST",
        "/v1/vms/{name}/thaw",
        Action::Thaw,
        "Let a frozen VM's traffic pass again",
    ),
    change(
        "POST",
        "/v1/vms/{name}/sleep",
        Action::Sleep,
        "Hold packets for a VM that is paused, until it is resumed",
    ),
    change(
        "POST",
        "/v1/vms/{name}/resume",
        Action::Resume,
        "Deliver the packets held for a VM that slept; to be called when its guest runs again",
    ),
    change(
        "POST",
        "/v1/vms/{name}/cut",
        Action::CutVm,
        "End all flows of a VM now, and tell both ends",
    ),
    change(
        "POST",
        "/v1/vms/{name}/generation",
        Action::EndGeneration,
        "End all flows of a VM that goes on from a snapshot or was rolled back, and tell both ends",
    ),
    read(
        "/v1/vms/{name}/why",
        Action::Why,
        "The rule that decides about a destination, and the flow's fate",
    ),
    read("/v1/flows", Action::Flows, "The live flows"),
    change(
        "POST",
        "/v1/flows/{id}/cut",
        Action::CutFlow,
        "End a flow now, and tell both ends",
    ),
    read(
        "/v1/policies",
        Action::ListPolicies,
        "The policies that were put, by name",
    ),
    read(
        "/v1/policies/{name}",
        Action::GetPolicy,
        "A policy that was put",
    ),
    change(
        "PUT",
        "/v1/policies/{name}",
        Action::PutPolicy,
        "Put a policy in force, for the VMs that name it; answered when it is",
    ),
    change(
        "DELETE",
        "/v1/policies/{name}",
        Action::RemovePolicy,
        "Take a policy back that no VM uses; answered when it is not in force any more",
    ),
    read(
        "/v1/machines",
        Action::ListMachines,
        "The machines of `slipgate run` whose VMs the daemon serves, by name",
    ),
    read(
        "/v1/machines/{name}",
        Action::GetMachine,
        "A machine, by the name of its VM",
    ),
    change(
        "POST",
        "/v1/machines/{name}/pause",
        Action::PauseMachine,
        "Pause a machine's guest; answered when it does not run",
    ),
    change(
        "POST",
        "/v1/machines/{name}/resume",
        Action::ResumeMachine,
        "Resume a machine's guest; packets that were held for a sleeping VM are delivered by /v1/vms/{name}/resume",
    ),
    change(
        "POST",
        "/v1/machines/{name}/balloon",
        Action::BalloonMachine,
        "Ask a machine's guest for so much of its memory; answered before it has given it",
    ),
    change(
        "POST",
        "/v1/machines/{name}/snapshot",
        Action::SnapshotMachine,
        "Save a machine to a new directory in --snapshot-dir; answered when all is on the disk",
    ),
    change(
        "POST",
        "/v1/machines/{name}/kill",
        Action::KillMachine,
        "End a machine, as SIGTERM to its `slipgate run` does; answered before it has ended",
    ),
    read("/v1/stats", Action::Stats, "Counters of each VM and in all"),
    read(
        "/v1/metrics",
        Action::Metrics,
        "The figures in Prometheus' text format, made once a second at most",
    ),
    change(
        "POST",
        "/v1/vms/{name}/capture",
        Action::CaptureVm,
        "The packets of a VM, as its guest sees them, until the client ends it",
    ),
    change(
        "POST",
        "/v1/flows/{id}/capture",
        Action::CaptureFlow,
        "The packets of a flow, as its guest sees them, until the client or the flow ends it",
    ),
    read(
        "/v1/events",
        Action::Events,
        "What happens, as one JSON object a line, until the client ends it",
    ),
];

/// The route of a request, and the value of its path's parameter.
///
/// # Errors
/// There is no such path (404), or it has no such method (405).
pub(crate) fn route<'p>(
    method: &Method,
    path: &'p str,
) -> Result<(&'static Route, &'p str), Problem> {
    let mut allowed = Vec::new();
    for route in ROUTES {
        if let Some(parameter) = matches(route.path, path) {
            if route.method == method.as_str() {
                return Ok((route, parameter));
            }
            allowed.push(route.method);
        }
    }
    Err(match allowed.is_empty() {
        true => Problem::new(
            StatusCode::NOT_FOUND,
            format!("there is no {path}: GET /v1/openapi.json lists the paths"),
        ),
        false => Problem::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!("{path} takes no {method}: use {}", allowed.join(", ")),
        ),
    })
}

/// The value of the parameter of `pattern` in `path`, or nothing where it has none; `None`: the
/// path is another.
fn matches<'p>(pattern: &str, path: &'p str) -> Option<&'p str> {
    let Some((before, rest)) = pattern.split_once('{') else {
        return (pattern == path).then_some("");
    };
    let after = rest.split_once('}')?.1;
    let value = path.strip_prefix(before)?.strip_suffix(after)?;
    (!value.is_empty() && !value.contains('/')).then_some(value)
}

/// A response that says which methods a reader may not use.
pub(crate) fn forbidden(route: &Route) -> Problem {
    Problem::new(
        StatusCode::FORBIDDEN,
        format!(
            "{} {}: this socket is for reading: use the one that `--api` names",
            route.method, route.path
        ),
    )
}

#[cfg(test)]
#[path = "routes_test.rs"]
mod tests;
