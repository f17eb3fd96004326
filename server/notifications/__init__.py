"""Alerts that go to where people are: chat, mail, pagers, webhooks, Alertmanager."""
