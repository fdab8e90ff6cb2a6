//! Conditions of a change: the headers If-Match and If-None-Match (RFC 9110, section 13.1).
use hyper::{
    HeaderMap, StatusCode,
    header::{HeaderName, IF_MATCH, IF_NONE_MATCH},
};
use slipgate_ipc::client::{Replaces, Version};

use crate::problem::Problem;

/// Values of the headers, as the client gave them.
#[derive(Clone, Copy, Default, Debug)]
pub struct Conditions<'r> {
    /// If-Match: the entity tags of which the present one must be one, or `*`.
    pub if_match: Option<&'r str>,
    /// If-None-Match: only `*`, with which nothing may exist yet.
    pub if_none_match: Option<&'r str>,
}

impl<'r> Conditions<'r> {
    /// Takes the conditions out of a request's headers.
    ///
    /// # Errors
    /// A header is given more than once, or is not ASCII: it must not be taken as absent.
    pub(crate) fn of(headers: &'r HeaderMap) -> Result<Self, Problem> {
        Ok(Self {
            if_match: value(headers, &IF_MATCH)?,
            if_none_match: value(headers, &IF_NONE_MATCH)?,
        })
    }

    /// The condition that the headers express.
    ///
    /// # Errors
    /// A header has another form.
    pub(crate) fn parsed(self) -> Result<Replaces, Problem> {
        match (self.if_match, self.if_none_match.map(str::trim)) {
            (None, None) => Ok(Replaces::Anything),
            (None, Some("*")) => Ok(Replaces::Nothing),
            (Some(tags), None) if tags.trim() == "*" => Ok(Replaces::Existing),
            (Some(tags), None) => {
                let versions = tags.split(',').map(|tag| version(tag.trim(), tags));
                let known = versions.filter_map(Result::transpose);
                Ok(Replaces::AnyOf(known.collect::<Result<_, _>>()?))
            }
            (_, Some(given)) => Err(refused(
                "If-None-Match",
                given,
                "give * alone, for an object that must not exist yet",
            )),
        }
    }
}

fn value<'r>(headers: &'r HeaderMap, name: &HeaderName) -> Result<Option<&'r str>, Problem> {
    let mut values = headers.get_all(name).iter();
    let (first, more) = (values.next(), values.next());
    match (first.map(|value| value.to_str()), more) {
        (None, _) => Ok(None),
        (Some(Ok(text)), None) => Ok(Some(text)),
        _ => Err(refused(name.as_str(), "…", "give it once, in ASCII")),
    }
}

/// The version in an entity tag. `None`: the tag is none of ours, and so nothing's present one.
/// Weak tags never match (RFC 9110, section 8.8.3.2).
fn version(tag: &str, given: &str) -> Result<Option<Version>, Problem> {
    let is_quoted = |tag: &str| tag.len() >= 2 && tag.starts_with('"') && tag.ends_with('"');
    let inner = tag.trim_matches('"');
    match Version::parse(inner) {
        // A shell may have taken the quotes.
        Some(version) if is_quoted(tag) || inner == tag => Ok(Some(version)),
        _ if is_quoted(tag.strip_prefix("W/").unwrap_or(tag)) => Ok(None),
        _ => Err(refused(
            "If-Match",
            given,
            "give an ETag that a GET or PUT has answered, in quotes, or *",
        )),
    }
}

fn refused(header: &str, given: &str, remedy: &str) -> Problem {
    let detail = format!("{header} {given}: {remedy}");
    Problem::new(StatusCode::BAD_REQUEST, detail)
}

#[cfg(test)]
#[path = "conditions_test.rs"]
mod tests;
