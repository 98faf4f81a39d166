"""Why a certificate was not accepted, in words for people."""

from __future__ import annotations


def untrusted(text: str, *, authority: str, address: str) -> str | None:
    """Explain an error text of OpenSSL and say what to do. None when it is about no certificate. authority, address:
    the names of the settings that hold the signing authority and the server's address."""
    if "CERTIFICATE_VERIFY_FAILED" not in text and "certificate verify failed" not in text:
        return None
    if "expired" in text:
        return "its certificate has expired: renew it on the server"
    if "not yet valid" in text:
        return "its certificate is not valid yet: check the clocks of both machines"
    if "mismatch" in text or "doesn't match" in text:
        return f"its certificate is for another host: use the name in the certificate in {address}"
    return f"its certificate is not trusted: set {authority} to the authority that signed it"


def refused_ours(text: str, *, setting: str) -> str | None:
    """Explain a TLS alert of a server that refused our client certificate. None when the text is no such alert.
    setting: the name of the setting that holds our certificate."""
    alerts = ("certificate required", "certificate unknown", "unknown ca", "bad certificate", "certificate expired")
    spelled = text.lower().replace("_", " ")
    if "alert" not in spelled or not any(alert in spelled for alert in alerts):
        return None
    return f"it requires a valid client certificate of an authority that it trusts: set {setting}"
