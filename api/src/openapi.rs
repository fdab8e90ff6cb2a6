//! The OpenAPI 3.1 document: made of the table of routes and of the bodies' types.
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use crate::{
    events::Kinds,
    machines::{BalloonBody, Machine, Snapshot, SnapshotBody},
    model::{CaptureBody, Cut, Health, Policy, PolicyPut, Vm, VmBody, VmPatch, Why},
    problem::{MEDIA_TYPE, Problem},
    response::{OPENMETRICS, PCAPNG},
    routes::{Action, ROUTES, Route},
};

/// Generates the OpenAPI document from the table of routes.
pub fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    for route in ROUTES {
        let of_path = paths.entry(route.path).or_insert_with(|| json!({}));
        of_path[route.method.to_lowercase()] = operation(route, &mut generator);
    }
    let schemas = generator.take_definitions(true);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "slipgate",
            "version": "1",
            "summary": "VMs, flows and counters of a slipgate daemon, on a Unix socket",
            "license": { "name": "Apache-2.0 OR MIT" },
        },
        "paths": paths,
        "components": { "schemas": schemas },
    })
}

fn operation(route: &Route, generator: &mut SchemaGenerator) -> Value {
    let mut operation = json!({
        "operationId": format!("{:?}", route.action),
        "summary": route.summary,
        "responses": responses(route.action, generator),
    });
    let parameters = parameters(route);
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    let body = match route.action {
        Action::PutVm => Some(generator.subschema_for::<VmBody>()),
        Action::PatchVm => Some(generator.subschema_for::<VmPatch>()),
        Action::SnapshotMachine => Some(generator.subschema_for::<SnapshotBody>()),
        Action::BalloonMachine => Some(generator.subschema_for::<BalloonBody>()),
        _ => None,
    };
    if route.action == Action::PutPolicy {
        operation["requestBody"] = json!({
            "required": true,
            "description": "TOML with the keys of `[policy.NAME]` in a policy file, and no deny_file",
            "content": { "application/toml": { "schema": { "type": "string" } } },
        });
    }
    if let Action::CaptureVm | Action::CaptureFlow = route.action {
        let schema = generator.subschema_for::<CaptureBody>();
        operation["requestBody"] = json!({
            "required": false,
            "content": { "application/json": { "schema": schema } },
        });
    }
    if let Some(schema) = body {
        operation["requestBody"] = json!({
            "required": true,
            "content": { "application/json": { "schema": schema } },
        });
    }
    operation
}

fn parameters(route: &Route) -> Vec<Value> {
    let text = json!({ "type": "string" });
    let one = |name: &str, place: &str, required: bool, schema: &Value, about: &str| {
        json!({
            "name": name,
            "in": place,
            "required": required,
            "schema": schema,
            "description": about,
        })
    };
    let query = |name, required, schema, about| one(name, "query", required, schema, about);
    let mut all = Vec::new();
    if route.path.contains("{name}") {
        all.push(one(
            "name",
            "path",
            true,
            &text,
            "Name of the VM, policy or machine",
        ));
    }
    if route.path.contains("{id}") {
        all.push(one("id", "path", true, &text, "Id of the flow"));
    }
    let port = json!({ "type": "integer", "minimum": 0, "maximum": 65_535 });
    let proto = json!({ "enum": ["tcp", "udp", "icmp"], "default": "tcp" });
    let address = json!({ "type": "string", "format": "ipv4" });
    let number = json!({ "type": "integer", "minimum": 0 });
    match route.action {
        Action::Why => {
            all.push(query(
                "address",
                true,
                &address,
                "Where the guest would connect to",
            ));
            all.push(query("port", false, &port, "Port, for tcp and udp"));
            all.push(query("proto", false, &proto, "Protocol"));
            all.push(query(
                "name",
                false,
                &text,
                "Name that it would have asked for before",
            ));
        }
        Action::RemovePolicy => {
            let about = "ETags of the object to remove; *: it must exist";
            all.push(one("If-Match", "header", false, &text, about));
        }
        Action::PutPolicy | Action::PutVm | Action::PatchVm => {
            let about = "ETags of the object to replace; *: it must exist";
            all.push(one("If-Match", "header", false, &text, about));
            let about = "*: it must not exist yet";
            all.push(one(
                "If-None-Match",
                "header",
                false,
                &json!({ "const": "*" }),
                about,
            ));
        }
        Action::Flows => all.push(query("vm", false, &text, "Show only this VM's")),
        Action::Events => {
            all.push(query("vm", false, &text, "Show only this VM's"));
            let kinds = Kinds::names().join(", ");
            let about = format!(
                "Only these kinds, separated by commas: all, or some of {kinds}; absent: all but \
                 those of flows and DNS"
            );
            all.push(query("kind", false, &text, &about));
            let after = "Number of the last event that the client has; absent: new events only";
            all.push(query("after", false, &number, after));
        }
        _ => {}
    }
    all
}

fn responses(action: Action, generator: &mut SchemaGenerator) -> Value {
    let object = json!({ "type": "object" });
    let body = |schema: Value| json!({ "application/json": { "schema": schema } });
    let answer =
        |about: &str, schema: Value| json!({ "description": about, "content": body(schema) });
    let vm = reference::<Vm>(generator);
    let mut responses = match action {
        Action::Health => json!({ "200": answer("It does", reference::<Health>(generator)) }),
        Action::OpenApi => json!({ "200": answer("The document", object) }),
        Action::ListVms => {
            json!({ "200": answer("The VMs", json!({ "type": "array", "items": vm })) })
        }
        Action::GetVm | Action::PatchVm | Action::KeepVm => json!({ "200": answer("The VM", vm) }),
        Action::PutVm => json!({
            "200": answer("The VM was there", vm.clone()),
            "201": answer("The VM was added", vm),
        }),
        Action::RemoveVm
        | Action::RemovePolicy
        | Action::Freeze
        | Action::Thaw
        | Action::Sleep
        | Action::Resume
        | Action::PauseMachine
        | Action::ResumeMachine
        | Action::BalloonMachine
        | Action::KillMachine => {
            json!({ "204": { "description": "Done" } })
        }
        Action::ListMachines => {
            let items = reference::<Machine>(generator);
            json!({ "200": answer("The machines", json!({ "type": "array", "items": items })) })
        }
        Action::GetMachine => {
            json!({ "200": answer("The machine", reference::<Machine>(generator)) })
        }
        Action::SnapshotMachine => {
            json!({ "201": answer("The snapshot", reference::<Snapshot>(generator)) })
        }
        Action::CutVm | Action::EndGeneration | Action::CutFlow => {
            json!({ "200": answer("They have ended", reference::<Cut>(generator)) })
        }
        Action::ListPolicies => {
            let items = reference::<Policy>(generator);
            json!({ "200": answer("The policies", json!({ "type": "array", "items": items })) })
        }
        Action::GetPolicy => json!({ "200": answer("The policy", reference::<Policy>(generator)) }),
        Action::PutPolicy => {
            json!({ "200": answer("It is in force", reference::<PolicyPut>(generator)) })
        }
        Action::Why => json!({ "200": answer("The decision", reference::<Why>(generator)) }),
        Action::Flows => {
            let about = "The flows, as `slipgate flows --json` has them";
            json!({ "200": answer(about, json!({ "type": "array", "items": object })) })
        }
        Action::Metrics => json!({ "200": {
            "description": "The figures, as `--metrics` shows them",
            "content": { OPENMETRICS: { "schema": { "type": "string" } } },
        } }),
        Action::CaptureVm | Action::CaptureFlow => json!({ "200": {
            "description": "The packets, as pcapng; the head comes when the capture has begun",
            "content": { PCAPNG: {} },
        } }),
        Action::Stats => {
            json!({ "200": answer("The counters, as `slipgate stats --json` has them", object) })
        }
        Action::Events => json!({ "200": {
            "description": "The events; the head comes at once, and none of the daemon's after it is \
                            missed",
            "content": { "application/x-ndjson": { "schema": object } },
        } }),
    };
    responses["default"] = json!({
        "description": "A problem (RFC 9457)",
        "content": { MEDIA_TYPE: { "schema": reference::<Problem>(generator) } },
    });
    responses
}

fn reference<T: JsonSchema>(generator: &mut SchemaGenerator) -> Value {
    generator.subschema_for::<T>().to_value()
}

#[cfg(test)]
#[path = "openapi_test.rs"]
mod tests;
